"""One slot's agent. SIGTERM ends it alone: engines run on, and the next agent takes them over.

On a node of its own: `relight-agent --config agent.json`. Beside an engine's container, which shares --shared with it:
`relight-agent --config agent.json --slot POD.NAMESPACE --controller HOST:PORT --address IP --shared /relight`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

from relight.agent.config import AgentConfig, load
from relight.agent.service import Agent
from relight.core import logs
from relight.core.clock import SystemClock
from relight.core.errors import RelightError


async def _run(config: AgentConfig) -> None:
    agent = Agent(config, SystemClock())
    task = asyncio.create_task(agent.run(lambda address: print(f"agent listens on {address}", flush=True)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _told(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand on the command line."""
    found = {
        "slot": arguments.slot,
        "controller_address": arguments.controller,
        "host": arguments.address,
        "bind_host": arguments.address,
        "serving_port": arguments.serving_port,
        "metrics_port": arguments.metrics_port,
        "token_file": None if arguments.token_file is None else str(arguments.token_file),
    }
    if arguments.shared is not None:
        found |= {"state_dir": str(arguments.shared / "state"), "supervisor_beside": True}
    # Where it is and whom it calls goes before all else.
    return {**arguments.settings, **{name: value for name, value in found.items() if value is not None}}


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected an object of settings as JSON, got {text[:80]!r}")
    return found


def main() -> int:
    """Exit status 0 after SIGTERM, 2 for a bad configuration or when no supervisor can be had."""
    parser = argparse.ArgumentParser(
        prog="relight-agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the settings")
    told = parser.add_argument_group("instead of what the file says")
    told.add_argument("--slot", help="name of the slot, unique in the fleet")
    told.add_argument("--controller", metavar="HOST:PORT", help="the controller's gRPC")
    told.add_argument("--address", metavar="IP", help="listen on this address, engines too")
    told.add_argument("--serving-port", type=int, metavar="PORT", help="answer here for whichever engine is ready")
    told.add_argument("--metrics-port", type=int, metavar="PORT", help="serve metrics here")
    told.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token for the controller, renewed by others"
    )
    told.add_argument("--settings", type=_settings, default={}, metavar="JSON", help="an object of any settings")
    told.add_argument("--shared", type=Path, metavar="DIR", help="state goes there, where a supervisor is waited for")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, _told(arguments))
        logs.configure("agent", level=config.log_level)
        asyncio.run(_run(config))
    except RelightError as error:
        print(f"relight agent: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
