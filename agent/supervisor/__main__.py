"""`python -m relight.agent.supervisor --socket PATH --journal PATH`: owns engines until shut down."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relight.agent.supervisor.server import Server
from relight.core import logs
from relight.core.clock import SystemClock
from relight.core.errors import RelightError


def main() -> int:
    """Exit status 0 after a shutdown, 2 when it could not begin (the reason is on standard error)."""
    parser = argparse.ArgumentParser(prog="relight-supervisor", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--journal", type=Path, required=True, help="journal of the processes it owns")
    arguments = parser.parse_args()
    logs.configure("supervisor")
    try:
        server = Server(arguments.socket, arguments.journal, SystemClock())
    except (RelightError, OSError) as error:
        print(f"relight supervisor: {error}", file=sys.stderr)
        return 2
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
