"""Commands that say what could be better."""

from __future__ import annotations

from typing import Annotated, Any

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


def capabilities(
    state: State = None,
    server: Server = None,
    slot: Annotated[str | None, typer.Option(help="Only of this slot.")] = None,
    paths: Annotated[bool, typer.Option("--paths", help="Which slots reach each other, and by what, instead.")] = False,
    output: Shown = Output.TABLE,
) -> None:
    """What engines can do on each slot's devices and versions, and what that rests on."""
    if paths:
        _paths([p for p in connected(server, state).items("/api/v1/paths") if slot in (None, p["slot"])], output)
        return
    found = [c for c in connected(server, state).items("/api/v1/capabilities") if slot in (None, c["slot"])]
    if output is Output.TABLE:
        for each in found:
            each["devices"], each["since"] = each["ranks"] or "any", render.when(each["at"])
    columns = [
        ("SLOT", "slot"), ("ENGINE", "engine"), ("CAPABILITY", "name"), ("DEVICES", "devices"), ("VERDICT", "verdict"),
        ("SEEN", "since"), ("REASON", "reason"),
    ]  # fmt: skip
    render.emit(found, output, columns)


def _paths(found: list[dict[str, Any]], output: Output) -> None:
    if output is Output.TABLE:
        for each in found:
            each["since"] = render.when(each["at"])
    columns = [
        ("SLOT", "slot"), ("READS", "to"), ("BY", "transport"), ("VERDICT", "verdict"), ("TRIED", "since"),
        ("REASON", "reason"),
    ]  # fmt: skip
    render.emit(found, output, columns)


def suggest(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    state: State = None,
    server: Server = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the model.")] = "default",
    output: Shown = Output.TABLE,
) -> None:
    """Say what a model's own record speaks for changing, and what that rests on; change nothing."""
    found = connected(server, state).items(f"/api/v1/namespaces/{namespace}/models/{model}/suggestions")
    if output is Output.TABLE and not found:
        typer.echo(f"the record of {model} speaks for no change")
        return
    columns = [("SETTING", "setting"), ("NOW", "now"), ("SUGGESTED", "suggested"), ("WHY", "evidence")]
    render.emit(found, output, columns)
