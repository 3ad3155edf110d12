"""`python -m relight.agent --config FILE.json`: one slot's agent. SIGTERM ends it alone."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

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


def main() -> int:
    """Exit status 0 after SIGTERM, 2 for a bad configuration or when no supervisor can be had."""
    parser = argparse.ArgumentParser(prog="relight-agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see docs/configuration")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config)
        logs.configure("agent", level=config.log_level)
        asyncio.run(_run(config))
    except RelightError as error:
        print(f"relight agent: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
