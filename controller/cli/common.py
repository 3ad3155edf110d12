"""What every command takes: where state lies, which controller, how results are printed."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from relight.controller.cli.client import Client
from relight.controller.cli.home import Home, state_directory
from relight.core.errors import FieldError, InvalidInput


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


State = Annotated[
    Path | None, typer.Option("--state", help="State directory; else $RELIGHT_STATE or ~/.local/state/relight.")
]
Server = Annotated[
    str | None,
    typer.Option("--server", envvar="RELIGHT_SERVER", help="Controller URL; else the machine that `up` started."),
]
Shown = Annotated[Output, typer.Option("--output", "-o", help="table for people, json for scripts.")]


def connected(server: str | None, state: Path | None) -> Client:
    """A client for the controller that was named, or for the one that runs here."""
    if server is not None:
        token = os.environ.get("RELIGHT_TOKEN", "")
        if not token:
            raise InvalidInput("no identity", [FieldError("RELIGHT_TOKEN", "a bearer token for --server", "nothing")])
        return Client(server, token, os.environ.get("RELIGHT_CA", ""))
    return Client(*Home(state_directory(state)).connect())
