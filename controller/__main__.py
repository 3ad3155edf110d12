"""The controller's process: `python -m relight.controller --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from relight.controller.config import ControllerConfig, load
from relight.controller.runtime import Controller
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput, RelightError
from relight.core.logs import configure, get_logger

EXIT_FAILED, EXIT_INVALID = 1, 2

log = get_logger("controller")


async def _run(config: ControllerConfig) -> None:
    controller = Controller(config, SystemClock())
    loop = asyncio.get_running_loop()
    # One of several may wait for long until it leads: that ends by a signal too.
    starting = asyncio.create_task(controller.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, starting.cancel)
    try:
        await starting
    except asyncio.CancelledError:
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, controller.ask_to_stop)
    try:
        await controller.wait()
    finally:
        await controller.stop()


def main() -> int:
    """Runs until SIGTERM or SIGINT; 0 then, 2 for a configuration that is not valid, 1 for any failure."""
    parser = argparse.ArgumentParser(prog="relight-controller", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the settings")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config)
        configure("controller", level=config.log_level)
        uvloop.run(_run(config))
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    except RelightError as error:
        log.error("controller.failed", code=error.code, error=str(error))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
