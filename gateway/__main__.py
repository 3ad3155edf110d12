"""`python -m relight.gateway --config FILE.json`: the front door. SIGTERM lets open requests finish."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from relight.core import logs
from relight.core.clock import SystemClock
from relight.core.errors import RelightError
from relight.core.records import RouteTable
from relight.gateway.app import App
from relight.gateway.config import GatewayConfig, load
from relight.gateway.desk import Desk
from relight.gateway.metrics import Metrics
from relight.gateway.routing import routing_stream
from relight.gateway.upstream import Upstream


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Left to `_run`: uvicorn would raise the signal again at the end, and the exit status would lie."""
        yield


async def _run(config: GatewayConfig) -> None:
    clock = SystemClock()
    upstream = Upstream()

    def update(table: RouteTable) -> None:
        desk.update(table)
        upstream.forget({r.url for m in table.models for r in m.replicas})

    def changed(urgent: bool) -> None:
        stream.changed(urgent)

    desk = Desk(config.name, config.hold.limits(), clock, changed)
    stream = routing_stream(config.controller(), clock, desk.report, update)
    metrics = Metrics(desk.held_by_model, lambda: stream.attached)
    app = App(desk, upstream, config.known_tokens(), clock, metrics, config.max_body_bytes, config.max_tries)
    listener = socket.create_server((config.host, config.port), backlog=2048)
    port = listener.getsockname()[1]
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="uvloop",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="critical",
            server_header=False,
            timeout_graceful_shutdown=int(config.grace_seconds),
            ssl_certfile=str(config.https.certificate) if config.https else None,
            ssl_keyfile=str(config.https.private_key) if config.https else None,
        )
    )

    def end() -> None:
        # Held requests would wait for replicas that this process will not see: clients try the next gateway.
        desk.close()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    routing = asyncio.create_task(stream.run(), name="routing")
    scheme = "https" if config.https else "http"
    print(f"gateway listens on {scheme}://{config.host}:{port}", flush=True)
    try:
        await server.serve(sockets=[listener])
    finally:
        routing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await routing
        upstream.close()


def main() -> int:
    """Exit status 0 after SIGTERM, 2 for a bad configuration or an address that cannot be had."""
    parser = argparse.ArgumentParser(prog="relight-gateway", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the settings")
    parser.add_argument("--name", help="unique among the gateways of one controller; instead of the file's")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, {"name": arguments.name} if arguments.name else None)
        logs.configure("gateway", level=config.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config))
    except (RelightError, OSError) as error:
        print(f"relight gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
