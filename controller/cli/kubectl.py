"""`kubectl relight`: kubectl runs `kubectl-relight`, and asks `kubectl_complete-relight` what may stand next."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys

from relight.controller.cli.main import app, run

NO_FILES = 4
"""What kubectl's completion is told after the candidates: names of files are none of them."""


def main() -> None:
    """The command line as a plugin; exit statuses are those of `relight`."""
    run("kubectl relight")


def complete() -> None:
    """Writes one candidate a line with its help after a tab, then `:` and a directive: kubectl's form for plugins."""
    *before, incomplete = sys.argv[1:] or [""]
    line = shlex.join(["relight", *before])
    # Fish's form of completion is the one that kubectl takes.
    os.environ |= {
        "_RELIGHT_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": f"{line} {incomplete}",
    }
    with contextlib.suppress(SystemExit):
        app(prog_name="relight")
    print(f":{NO_FILES}")
