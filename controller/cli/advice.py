"""Commands that say what could be better."""

from __future__ import annotations

from typing import Annotated

import typer

from relight.controller.cli import render, told
from relight.controller.cli.common import Output, Server, Shown, State, connected


def doctor(
    state: State = None,
    server: Server = None,
    model: Annotated[str | None, typer.Option(help="Only of this model, as namespace/name.")] = None,
    output: Shown = Output.TABLE,
) -> None:
    """Say what could be better of models and slots: what was seen, what it costs, what to do."""
    found = connected(server, state).items("/api/v1/doctor", model=model)
    if output is Output.JSON:
        render.emit(found, output)
    else:
        told.findings(found)
