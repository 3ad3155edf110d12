"""`python -m relight.controller.cli`: the command `relight` where its script is not on PATH."""

from relight.controller.cli.main import run

run()
