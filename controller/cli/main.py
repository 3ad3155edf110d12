"""The command `relight`: every command with its help, examples and exit statuses; the work is done beside it."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from relight.controller.cli import advice, cache, cluster, machine, render, told, watching
from relight.controller.cli import pki as authority
from relight.controller.cli import up as machine_up
from relight.controller.cli.client import EXIT, exit_status
from relight.controller.cli.common import Output, Server, Shown, State, connected
from relight.controller.cli.home import Home, state_directory
from relight.core.clock import SystemClock
from relight.core.errors import FieldError, InvalidInput, RelightError
from relight.core.ids import is_name

ELSEWHERE = (
    "Commands speak to the machine that `up` started; with --server to another controller, with the bearer token in "
    "$RELIGHT_TOKEN and, where its certificate is of an authority of its own, the PEM file in $RELIGHT_CA."
)
STATUSES = "Exit status: " + ", ".join(f"{number} {name}" for name, number in EXIT.items()) + "."

app = typer.Typer(
    name="relight",
    help=f"Bring LLM replicas up in seconds from dormant guardians.\n\n{ELSEWHERE}\n\n{STATUSES}",
    epilog="Example: relight up -f examples/machine.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(cache.app, name="cache")
app.command(epilog="Example: relight definitions --apply")(cluster.definitions)
app.command(epilog="Example: relight purge --yes")(cluster.purge)
app.command(epilog="Example: relight doctor --model default/smollm2")(advice.doctor)
app.command(epilog="Example: relight capabilities --output json")(advice.capabilities)
app.command(epilog="Example: relight suggest smollm2")(advice.suggest)


Namespaced = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the model.")]


@app.command(epilog="Example: relight up -f examples/machine.yaml")
def up(
    file: Annotated[Path, typer.Option("--file", "-f", help="The machine's YAML file.")],
    state: State = None,
    wait: Annotated[bool, typer.Option(help="Wait until replicas and guardians stand.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for them.")] = 1800.0,
    output: Shown = Output.TABLE,
) -> None:
    """Start everything on this machine: controller, gateway, one agent per node, engines."""
    home = Home(state_directory(state))
    config = machine.load(file)
    client = machine_up.up(config, home, SystemClock(), render.note)
    if wait:
        watching.until_standing(client, config, timeout, render.note)
    said = json.loads(home.connection.read_text())
    shown = {"controller": said["url"], "gateway": said["gateway"], "state": str(home.path)}
    if output is Output.JSON:
        render.emit(shown, "json")
    else:
        name = config.models[0].served_names[0] if config.models[0].served_names else config.models[0].name
        typer.echo(
            f"Relight is up. OpenAI API: {shown['gateway']}/v1   controller: {shown['controller']}\n"
            f"  curl -s {shown['gateway']}/v1/completions -H 'content-type: application/json' \\\n"
            f'    -d \'{{"model": "{name}", "prompt": "Hello", "max_tokens": 8}}\'\n'
            f"  relight scale {config.models[0].name} 2      relight status      relight down"
        )


@app.command(epilog="Example: relight down")
def down(state: State = None) -> None:
    """End every component and engine that `up` started on this machine."""
    home = Home(state_directory(state))
    ended = machine_up.down(home, render.note)
    typer.echo(f"{ended} ended" if ended else f"nothing was up in {home.path}")


@app.command(
    epilog="Example: relight pki tls --component controller=relight-controller.relight-system.svc "
    "--component gateway --component relight-agent"
)
def pki(
    directory: Annotated[Path, typer.Argument(help="Where the files go; those of an earlier call are replaced.")],
    component: Annotated[
        list[str], typer.Option(help="NAME, or NAME=HOST,HOST of other names and addresses by which it is reached.")
    ],
) -> None:
    """Make a certificate authority and a certificate for each component. The authority's key is not kept."""
    hosts = {}
    for entry in component:
        name, _, others = entry.partition("=")
        if not is_name(name):
            raise InvalidInput("no certificate", [FieldError("--component", "a name, or name=host,host", repr(entry))])
        hosts[name] = tuple(filter(None, others.split(",")))
    authority.make(directory, tuple(hosts), SystemClock(), hosts)
    typer.echo(f"{directory}: ca.pem, {', '.join(f'{name}.pem, {name}.key' for name in hosts)}")


@app.command(epilog="Example: relight status --output json")
def status(
    state: State = None, server: Server = None, namespace: Namespaced = "default", output: Shown = Output.TABLE
) -> None:
    """Components, slots, the models of a namespace, and what is under way."""
    home = Home(state_directory(state))
    client = connected(server, state)
    running = [] if server else [{"component": p.name, "pid": p.pid, "alive": p.alive()} for p in home.processes()]
    if running and output is Output.TABLE:
        # Before anything is asked: it says which of them is gone when the controller does not answer.
        render.emit(running, "table", [("COMPONENT", "component"), ("PID", "pid"), ("ALIVE", "alive")])
    whole = {
        "components": running,
        "slots": client.items("/api/v1/slots"),
        "models": client.items(f"/api/v1/namespaces/{namespace}/models"),
        "operations": [o for o in client.items("/api/v1/operations") if o["state"] == "running"],
    }
    if output is Output.JSON:
        render.emit(whole, "json")
        return
    render.emit(
        whole["slots"], "table", [
            ("SLOT", "name"), ("ALIVE", "alive"), ("DEVICES", "devices"), ("ENGINES", "engines"),
            ("HOST COPIES (BYTES)", "host_tier.bytes"),
        ],
    )  # fmt: skip
    render.emit(whole["models"], "table", MODEL_COLUMNS)
    if whole["operations"]:
        render.emit(whole["operations"], "table", OPERATION_COLUMNS)


MODEL_COLUMNS = [
    ("MODEL", "spec.name"), ("REPLICAS", "spec.replicas"), ("READY", "ready"), ("COMING", "coming"),
    ("GUARDIANS", "spec.guardians.replicas"), ("DORMANT", "dormant"), ("MODE", "spec.mode"),
    ("REVISION", "spec.revision"),
]  # fmt: skip
OPERATION_COLUMNS = [
    ("OPERATION", "id"), ("KIND", "kind"), ("MODEL", "model"), ("FROM", "replicas_before"), ("TO", "replicas_after"),
    ("STATE", "state"), ("PREDICTED", "predicted_seconds"), ("REASON", "reason"),
]  # fmt: skip


@app.command(epilog="Example: relight models -n default")
def models(
    state: State = None, server: Server = None, namespace: Namespaced = "default", output: Shown = Output.TABLE
) -> None:
    """The models of a namespace, wanted and actual."""
    render.emit(connected(server, state).items(f"/api/v1/namespaces/{namespace}/models"), output, MODEL_COLUMNS)


@app.command(epilog="Example: relight instances --model default/smollm2")
def instances(
    state: State = None,
    server: Server = None,
    model: Annotated[str | None, typer.Option(help="Only of this model, as namespace/name.")] = None,
    output: Shown = Output.TABLE,
) -> None:
    """Every instance: running, dormant, and in between."""
    found = connected(server, state).items("/api/v1/instances", model=model)
    if output is Output.TABLE:
        for each in found:
            first = (each["members"] or [{}])[0]
            each["where"] = ", ".join(f"{m['slot']}:{'+'.join(m['devices'])}" for m in each["members"])
            each["incarnation"] = first.get("incarnation")
            each["memory"] = render.size((first.get("memory") or {}).get("total_bytes"))
            each["why"] = (each.get("failure") or {}).get("reason") or first.get("progress") or each["cause"]
    columns = [
        ("INSTANCE", "id"), ("MODEL", "model"), ("STATE", "state"), ("WANTED", "desired"), ("WHERE", "where"),
        ("INCARNATION", "incarnation"), ("MEMORY", "memory"), ("IN FLIGHT", "in_flight"), ("WHY", "why"),
    ]  # fmt: skip
    render.emit(found, output, columns)


@app.command(epilog="Example: relight devices")
def devices(state: State = None, server: Server = None, output: Shown = Output.TABLE) -> None:
    """Devices with their measured memory and who holds it."""
    found = connected(server, state).items("/api/v1/devices")
    if output is Output.TABLE:
        for each in found:
            each["used"], each["total"] = render.size(each["used_bytes"]), render.size(each["total_bytes"])
            each["held"] = ", ".join(
                f"{h['instance'] or 'UNKNOWN ' + h['name']} {render.size(h['bytes'])}" for h in each["holders"]
            )
    columns = [
        ("SLOT", "slot"), ("DEVICE", "id"), ("KIND", "kind"), ("USED", "used"), ("TOTAL", "total"),
        ("HEALTHY", "healthy"), ("INSTANCE", "instance"), ("HELD BY", "held"), ("REASON", "reason"),
    ]  # fmt: skip
    render.emit(found, output, columns)


Replicas = Annotated[int, typer.Argument(min=0, max=10_000, help="How many replicas there shall be.")]
Model = Annotated[str, typer.Argument(help="The model's name.")]
Rung = Annotated[
    list[str] | None,
    typer.Option(
        "--rung",
        help=(
            "Only these rungs, in order: peer_shm, peer_nvlink, peer_nixl, peer_rdma, peer_tcp, host_copy, host_shm, "
            "host_tcp, storage, disk."
        ),
    ),
]


@app.command(epilog="Example: relight scale smollm2 2 --rung peer_tcp")
def scale(
    model: Model,
    replicas: Replicas,
    rung: Rung = None,
    state: State = None,
    server: Server = None,
    namespace: Namespaced = "default",
    wait: Annotated[bool, typer.Option(help="Wait until the operation has ended.")] = True,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait.")] = 900.0,
    output: Shown = Output.TABLE,
) -> None:
    """Change a model's number of replicas."""
    client = connected(server, state)
    body: dict[str, Any] = {"replicas": replicas}
    if rung:
        body["rungs"] = rung
    operation = client.call("PUT", f"/api/v1/namespaces/{namespace}/models/{model}/scale", body=body)
    if wait:
        operation = watching.until_ended(client, operation, timeout, render.note)
    render.emit(operation, output, OPERATION_COLUMNS)
    if operation["state"] == "failed":
        raise typer.Exit(EXIT["operation failed"])


@app.command(epilog="Example: relight plan smollm2 2")
def plan(
    model: Model,
    replicas: Replicas,
    state: State = None,
    server: Server = None,
    namespace: Namespaced = "default",
    output: Shown = Output.TABLE,
) -> None:
    """Say what a scale would do, by which mode and rungs, why, and how long it would take; change nothing."""
    path = f"/api/v1/namespaces/{namespace}/models/{model}/scale"
    planned = connected(server, state).call("PUT", path, body={"replicas": replicas}, query={"dry_run": "server"})
    if output is Output.JSON:
        render.emit(planned, output)
        return
    for decision in planned["decisions"]:
        numbers = f"{decision['replicas']} replica(s), {decision['guardians']} guardian(s)"
        typer.echo(f"{decision['model']}: {numbers}: {decision['reason']}")
    columns = [
        ("INSTANCE", "instance"), ("BECOMES", "desired"), ("MODE", "mode"), ("SLOTS", "slots"),
        ("PREDICTED S", "predicted_seconds"), ("REASON", "reason"),
    ]  # fmt: skip
    if planned["placements"]:
        render.emit(planned["placements"], "table", columns)
    for placement in planned["placements"]:
        for step in placement["rungs"]:
            typer.echo(f"  {placement['instance']} rung {step['kind']}: {step['reason']}")
        for price in placement["prices"]:
            fits = "fits" if price["fits"] else "does not fit"
            said = f"{price['seconds']:.3f} s, {fits}: {price['reason']}"
            typer.echo(f"  {placement['instance']} mode {price['mode']}: {said}")
    for reason in planned["unplaced"]:
        typer.echo(f"  not placed: {reason}")
    if not planned["placements"] and not planned["unplaced"]:
        typer.echo("nothing would change")


@app.command(epilog="Example: relight autoscaler smollm2")
def autoscaler(
    model: Model,
    state: State = None,
    server: Server = None,
    namespace: Namespaced = "default",
    output: Shown = Output.TABLE,
) -> None:
    """Say what the built-in autoscaler decided of a model of late, and why."""
    found = connected(server, state).call("GET", f"/api/v1/namespaces/{namespace}/models/{model}/autoscaler")
    if output is Output.TABLE:
        told.decisions(found, model)
    else:
        render.emit(found, output)


@app.command(epilog="Example: relight watch --since 120")
def watch(
    state: State = None,
    server: Server = None,
    since: Annotated[int | None, typer.Option(min=0, help="Go on after this revision.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many events.")] = None,
    output: Shown = Output.TABLE,
) -> None:
    """Follow what changes, one line per event, until interrupted."""
    watching.follow(connected(server, state), since, count, as_json=output is Output.JSON)


class Format(StrEnum):
    """What a timeline is written as."""

    TEXT = "text"
    CHROME = "chrome"
    OTLP = "otlp"


@app.command(epilog="Example: relight timeline i-0123456789 --format chrome --file start.json")
def timeline(
    instance: Annotated[str | None, typer.Argument(help="The instance; without it, the newest start.")] = None,
    state: State = None,
    server: Server = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="text; chrome: trace events for Perfetto; otlp: OTLP/JSON spans."),
    ] = Format.TEXT,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Write a trace here, not to stdout.")] = None,
    output: Shown = Output.TABLE,
) -> None:
    """One start as a waterfall that accounts for all of its wall time, and what became slower since the last."""
    if file is not None and form is Format.TEXT:
        raise InvalidInput("nothing to write", [FieldError("--file", "with --format chrome or otlp", form)])
    client = connected(server, state)
    if instance is None:
        newest = client.call("GET", "/api/v1/starts", query={"limit": 1})["items"]
        if not newest:
            typer.echo("nothing was started yet: `relight scale MODEL N` starts something")
            return
        instance = newest[0]["instance"]
    path = f"/api/v1/instances/{instance}/timeline"
    if form is not Format.TEXT:
        render.trace(client.call("GET", f"{path}/{form}"), file)
        return
    found = client.call("GET", path)
    if output is Output.JSON:
        render.emit(found, output)
    else:
        render.waterfall(found)
        told.comparison(found["comparison"])


@app.command(epilog="Example: relight explain smollm2")
def explain(
    name: Annotated[str, typer.Argument(help="An instance, or a model for each of its instances.")],
    state: State = None,
    server: Server = None,
    namespace: Namespaced = "default",
    output: Shown = Output.TABLE,
) -> None:
    """Say why a replica came up the way it did, and what the other modes would have cost."""
    found = told.find(connected(server, state), name, namespace)
    if output is Output.JSON:
        render.emit(found, output)
        return
    for each in found:
        told.explanation(each)
    if not found:
        typer.echo(f"no instance of {name} has a recorded start: `relight scale {name} N` starts something")


@app.command(epilog="Example: relight logs i-0123456789 --follow")
def logs(
    instance: Annotated[str, typer.Argument(help="The instance.")],
    state: State = None,
    server: Server = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is appended.")] = False,
    tail_bytes: Annotated[int, typer.Option(min=0, max=16 << 20, help="How much of the end.")] = 64 << 10,
) -> None:
    """The engine's own log of an instance."""
    path = f"/api/v1/instances/{instance}/logs"
    for piece in connected(server, state).stream(path, {"tail_bytes": tail_bytes, "follow": str(follow).lower()}):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()


def run(name: str = "relight") -> None:
    """Entry point: errors become one line that says what to do, and the documented exit status."""
    try:
        app(prog_name=name)
    except RelightError as error:
        print(f"relight: {error}", file=sys.stderr)
        sys.exit(exit_status(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away: not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
