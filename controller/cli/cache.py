"""`relight cache`: what the compile-cache ring holds, why keys differ, quarantines, and archives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from relight.controller.cli import render
from relight.controller.cli.common import Output, Server, Shown, State, connected
from relight.controller.cli.home import Home, state_directory
from relight.core.errors import FieldError, InvalidInput, NotFound, RelightError, Unavailable

app = typer.Typer(
    help="The compile-cache ring: bundles of what engines compile, by key.", no_args_is_help=True,
    rich_markup_mode=None, epilog="Example: relight cache list",
)  # fmt: skip
Key = Annotated[str, typer.Argument(help="A key's digest, or the beginning of it (at least 4 digits).")]
Directory = Annotated[Path, typer.Argument(help="The archive's directory.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration of an agent on this host; else one that `up` started here."),
]


@app.command("list", epilog="Example: relight cache list --output json")
def list_(state: State = None, server: Server = None, output: Shown = Output.TABLE) -> None:
    """Every key: its model, bundle, size, the nodes that hold it, and why it is in quarantine."""
    found = connected(server, state).items("/api/v1/cache/bundles")
    if output is Output.TABLE:
        for each in found:
            each["short"], each["size"] = each["bundle"][:12], render.size(each["bytes"])
            each["used"] = render.when(each["last_use"])
    columns = [
        ("KEY", "key"), ("MODEL", "model"), ("BUNDLE", "short"), ("SIZE", "size"), ("LAST USE", "used"),
        ("NODES", "nodes"), ("REASON", "quarantine"),
    ]  # fmt: skip
    render.emit(found, output, columns)


@app.command(epilog="Example: relight cache nodes --output json")
def nodes(state: State = None, server: Server = None, output: Shown = Output.TABLE) -> None:
    """Every cache node: its address, how full it is, its starts, and the public key that others have to trust."""
    slots = connected(server, state).items("/api/v1/slots")
    found = [{"slot": s["name"], "alive": s["alive"], **s["cache"]} for s in slots if s["cache"]]
    if output is Output.TABLE:
        for each in found:
            each["used"] = f"{render.size(each['bytes'])} of {render.size(each['quota'])}"
    columns = [
        ("SLOT", "slot"), ("ALIVE", "alive"), ("ADDRESS", "address"), ("BUNDLES", "bundles"), ("USED", "used"),
        ("QUARANTINED", "quarantined"), ("HITS", "hits"), ("MISSES", "misses"), ("COMPILES", "compiles"),
        ("PUBLIC KEY", "signer"),
    ]  # fmt: skip
    render.emit(found, output, columns)


@app.command(epilog="Example: relight cache show 3f1c9a")
def show(key: Key, state: State = None, server: Server = None, output: Shown = Output.TABLE) -> None:
    """One key: its bundle, and every component that changes what is compiled."""
    found = connected(server, state).call("GET", f"/api/v1/cache/keys/{key}")
    if output is Output.JSON:
        render.emit(found, output)
        return
    about = {
        "key": found["key"], "bundle": found["bundle"], "size": render.size(found["bytes"]), "files": found["files"],
        "nodes": found["nodes"], "signer": found["signer"], "built at": found["built_at"],
        "compile seconds": found["compile_seconds"], "last use": render.when(found["last_use"]),
        "quarantine": found["quarantine"],
    }  # fmt: skip
    rows = [{"name": name, "value": value} for name, value in {**about, **found["fields"]}.items()]
    render.emit(rows, "table", [("COMPONENT", "name"), ("WHY", "value")])


@app.command(epilog="Example: relight cache diff 3f1c9a 77ab02")
def diff(key: Key, other: Key, state: State = None, server: Server = None, output: Shown = Output.TABLE) -> None:
    """In which components two keys differ: why what was compiled for one is of no use to the other."""
    client = connected(server, state)
    first, second = (client.call("GET", f"/api/v1/cache/keys/{k}")["fields"] for k in (key, other))
    found = [
        {"component": name, "first": first.get(name), "second": second.get(name)}
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    ]
    if output is Output.TABLE and not found:
        typer.echo("the keys are equal")
        return
    render.emit(found, output, [("COMPONENT", "component"), (key, "first"), (other, "second")])


@app.command(epilog="Example: relight cache release 3f1c9a")
def release(key: Key, state: State = None, server: Server = None, output: Shown = Output.TABLE) -> None:
    """End a key's quarantine on every node; the next start of it compiles anew."""
    said = connected(server, state).call("POST", f"/api/v1/cache/keys/{key}/release")
    if output is Output.JSON:
        render.emit(said, output)
    else:
        typer.echo(f"{said['entry']['key']} released on {', '.join(said['nodes'])}")


@app.command(epilog="Example: relight cache export /mnt/usb/bundles")
def export(directory: Directory, config: Config = None, state: State = None) -> None:
    """Copy the ring's bundles into a directory, signatures included. Run it where an agent runs."""
    _carry("export", directory, config, state)


@app.command("import", epilog="Example: relight cache import /mnt/usb/bundles --config /etc/relight/agent.json")
def import_(directory: Directory, config: Config = None, state: State = None) -> None:
    """Publish a directory's bundles to the ring. Their signers must be trusted (compile_cache.trusted_keys)."""
    _carry("import", directory, config, state)


def _carry(action: str, directory: Path, config: Path | None, state: Path | None) -> None:
    file = config or _an_agent(Home(state_directory(state)))
    command = [sys.executable, "-m", "relight.agent.cache", action, str(directory.resolve()), "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise Unavailable(done.stderr.strip().removeprefix("relight cache: "))
    typer.echo(done.stdout.strip())
    if done.returncode:
        raise RelightError(f"not every bundle was carried; {done.stderr.strip()}".rstrip("; "))


def _an_agent(home: Home) -> Path:
    found: list[Any] = sorted((home.path / "config").glob("agent-*.json"))
    if not found:
        wrong = FieldError("--config", "the configuration of an agent on this host", "nothing")
        raise NotFound(str(InvalidInput(f"no agent was brought up in {home.path}", [wrong])))
    return Path(found[0])
