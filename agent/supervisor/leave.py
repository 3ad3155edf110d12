"""`python -m relight.agent.supervisor.leave --socket PATH`: returns once no instance runs here any more.

What runs before a slot pod's containers are ended: the controller sees that the pod goes, and moves its replica
elsewhere; whoever asked for the end decides, by the pod's grace period, how long that may take.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from relight.agent.supervisor.client import Exit, SupervisorClient
from relight.core.errors import RelightError

INSTANCES = "i-"
"""How names of instances begin; zygotes and host copies hold nothing that anybody has to be moved away from."""


async def leave(path: Path) -> None:
    """Returns when the supervisor at `path` has no instance, or is gone. Raises InvalidInput for another version."""
    ended = asyncio.Event()

    def on_exit(_: Exit) -> None:
        ended.set()

    client = SupervisorClient(on_exit)
    await client.connect(path)
    try:
        while any(r.instance.startswith(INSTANCES) for r in await client.list()):
            waits = [asyncio.create_task(e.wait()) for e in (ended, client.lost)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            ended.clear()
    finally:
        await client.close()


def main() -> int:
    """Exit status 0 always: nothing that goes wrong here may keep a pod."""
    parser = argparse.ArgumentParser(prog="relight-leave", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the supervisor's")
    try:
        asyncio.run(leave(parser.parse_args().socket))
    except RelightError as error:
        print(f"relight-leave: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
