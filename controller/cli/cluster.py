"""`relight definitions` and `relight purge`: what a cluster has of Relight beside its programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
import yaml

from relight.controller.kubernetes import installed
from relight.controller.kubernetes.api import Api
from relight.controller.kubernetes.definitions import definitions as current
from relight.core.clock import SystemClock
from relight.core.errors import FieldError, InvalidInput

T = TypeVar("T")
Kubeconfig = Annotated[
    Path | None,
    typer.Option(help="How the cluster is reached; else $KUBECONFIG, ~/.kube/config, or the pod's own account."),
]


def _path(told: Path | None) -> Path | None:
    usual = Path.home() / ".kube" / "config"
    named = os.environ.get("KUBECONFIG")
    return told or (Path(named) if named else usual if usual.exists() else None)


def _with_api(kubeconfig: Path | None, work: Callable[[Api], Awaitable[T]]) -> T:
    async def run() -> T:
        api = await Api.open(_path(kubeconfig))
        try:
            return await work(api)
        finally:
            await api.close()

    return asyncio.run(run())


def definitions(
    apply: Annotated[bool, typer.Option("--apply", help="Write them to the cluster; else print them.")] = False,
    kubeconfig: Kubeconfig = None,
) -> None:
    """The definitions of ModelDeployment, DevicePool and EngineRuntime as this version has them."""
    if not apply:
        typer.echo(yaml.safe_dump_all(current(), sort_keys=False), nl=False)
        return
    changed = _with_api(kubeconfig, installed.update_definitions)
    typer.echo(f"updated: {', '.join(changed)}" if changed else "the cluster's definitions are current")


def purge(
    yes: Annotated[bool, typer.Option("--yes", help="Really: every model of the cluster ends.")] = False,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds for a running controller to end instances in good order.")
    ] = 30.0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds until all of it has to be gone.")] = 60.0,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete all models, pools and runtimes of the cluster, and their definitions: what an uninstallation leaves."""
    if not yes:
        found = _with_api(kubeconfig, installed.holding)
        there = [f"{len(names)} {kind}" for kind, names in found.objects.items()]
        said = f"{', '.join(there)} and {len(found.definitions)} definitions"
        raise InvalidInput("nothing was deleted", [FieldError("--yes", f"given, to delete {said}", "nothing")])
    gone = _with_api(kubeconfig, lambda api: installed.purge(api, SystemClock(), patience, timeout))
    for kind, names in gone.objects.items():
        typer.echo(f"{kind}: {', '.join(names) or 'none'}")
    typer.echo(f"definitions: {', '.join(gone.definitions) or 'none'}")
