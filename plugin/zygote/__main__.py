"""`python -m relight.plugin.zygote --socket PATH --preload MODULE`: imports, checks, and forks until it is ended."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from relight.core import logs
from relight.core.clock import SystemClock
from relight.plugin.zygote import place, server


def main() -> int:
    """Exit status 0 when ended, 2 when nothing may be forked from it (the reason is on standard error)."""
    parser = argparse.ArgumentParser(prog="relight-zygote", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to fork on")
    parser.add_argument("--preload", required=True, help="module with preload() and in_child()")
    parser.add_argument("room", nargs="?", help="filler that a child's own command line is written over")
    arguments = parser.parse_args()
    place.show([word for word in sys.orig_argv if word != arguments.room], None)
    logs.configure("zygote")
    zygote = server.Zygote(arguments.socket, importlib.import_module(arguments.preload), SystemClock())
    try:
        zygote.prepare()
    except server.Unfit as error:
        print(f"relight zygote: {error}", file=sys.stderr)
        return 2
    zygote.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
