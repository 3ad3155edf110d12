"""Waiting for things from the command line: until all stand, until an operation ended, and following events."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from threading import Event
from typing import Any

import typer

from relight.controller.cli.client import Client
from relight.controller.cli.machine import MachineConfig
from relight.core.clock import SystemClock
from relight.core.errors import RelightError

Say = Callable[[str], None]
LOOK_SECONDS = 0.5
REMIND_SECONDS = 20.0


class NotStanding(RelightError):
    """What was waited for did not come in time, or failed."""

    code = "not-standing"


def _told(instance: dict[str, Any]) -> str:
    member = (instance["members"] or [{}])[0]
    why = (instance.get("failure") or {}).get("reason") or member.get("progress") or instance["cause"]
    where = member.get("slot", "?")
    return f"{instance['id']} on {where} ({instance['model']}): {instance['state']}, {why}"


def until_standing(client: Client, config: MachineConfig, timeout: float, say: Say) -> None:
    """Returns when every model has its replicas ready and its guardians dormant.

    Says a line at each change, and reminds of what goes on. Raises NotStanding when an instance failed for
    good, or at the deadline.
    """
    clock, pause = SystemClock(), Event()
    begun = clock.monotonic()
    said: dict[str, str] = {}
    reminded = begun
    while True:
        found = client.items("/api/v1/instances")
        now = clock.monotonic()
        remind = now - reminded > REMIND_SECONDS
        for instance in found:
            text = _told(instance)
            if said.get(instance["id"]) != text or (remind and instance["state"] in ("starting", "none")):
                said[instance["id"]] = text
                say(f"[{now - begun:5.0f} s] {text}")
        reminded = now if remind else reminded
        if all(_stands(found, f"{m.namespace}/{m.name}", m.replicas, m.guardians.replicas) for m in config.models):
            return
        lost = [i for i in found if i["state"] == "failed" and (i.get("failure") or {}).get("retry_after") is None]
        if lost:
            raise NotStanding(
                f"{_told(lost[0])}; `relight logs {lost[0]['id']}` shows its log, `relight down` ends all"
            )
        if now - begun > timeout:
            raise NotStanding(f"not all stands after {timeout:.0f} s; `relight instances` tells what is missing")
        pause.wait(LOOK_SECONDS)


def _stands(found: list[dict[str, Any]], model: str, replicas: int, guardians: int) -> bool:
    own = [i for i in found if i["model"] == model]
    ready = sum(i["state"] == "ready" for i in own)
    dormant = sum(i["state"] == "dormant" for i in own)
    return bool(ready >= replicas and dormant >= guardians)


def until_ended(client: Client, operation: dict[str, Any], timeout: float, say: Say) -> dict[str, Any]:
    """The operation as it ended, or as it is at the deadline."""
    clock = SystemClock()
    deadline = clock.monotonic() + timeout
    name = operation["id"]
    predicted = operation.get("predicted_seconds")
    say(
        f"{name}: {operation['replicas_before']} -> {operation['replicas_after']}"
        + (f", predicted {predicted:.2f} s" if predicted else "")
    )
    while operation["state"] == "running" and (left := deadline - clock.monotonic()) > 0:
        wait = min(left, 30.0)
        operation = client.call("GET", f"/api/v1/operations/{name}", query={"wait": wait})
    return operation


def follow(client: Client, since: int | None, count: int | None, *, as_json: bool) -> None:
    """Prints events until interrupted, or until `count` of them came."""
    resume = {} if since is None else {"last-event-id": str(since)}
    rest = b""
    for piece in client.stream("/api/v1/events", {"limit_events": count}, resume):
        *blocks, rest = (rest + piece).split(b"\n\n")
        for block in blocks:
            event = dict(line.split(": ", 1) for line in block.decode().splitlines() if not line.startswith(":"))
            if "data" in event:
                _print(event, as_json)


def _print(event: dict[str, str], as_json: bool) -> None:
    data = json.loads(event["data"])
    if as_json:
        typer.echo(json.dumps({"revision": event.get("id"), "event": event.get("event"), "data": data}))
    else:
        typer.echo(f"{event.get('id', '-'):>8}  {event.get('event', ''):<12} {_line(data)}")
    sys.stdout.flush()


def _line(data: dict[str, Any]) -> str:
    if data["deleted"]:
        return f"{data['name']} deleted"
    told = data.get("object") or {}
    keys = ("model", "instance", "state", "desired", "replicas_after", "ok", "way", "seconds", "reason")
    return " ".join([data["name"], *(f"{k}={told[k]}" for k in keys if told.get(k) not in (None, ""))])
