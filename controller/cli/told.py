"""How the CLI tells of one start: why it was so, what other modes would have cost, what became slower."""

from __future__ import annotations

from typing import Any

from relight.controller.cli.client import Client
from relight.controller.cli.render import cached, console, emit, when
from relight.core.errors import NotFound

LONGEST = 5
"""Parts of a start that are shown with what makes them shorter."""


def find(client: Client, name: str, namespace: str) -> list[dict[str, Any]]:
    """The explanations of an instance, or of each instance of a model; raises NotFound when it is neither."""
    if "/" not in name:
        try:
            return [client.call("GET", f"/api/v1/instances/{name}/explanation")]
        except NotFound as error:
            no_start = str(error)
    else:
        namespace, _, name = name.partition("/")
        no_start = f"{namespace}/{name} is a model's name"
    try:
        return client.items(f"/api/v1/namespaces/{namespace}/models/{name}/explanations")
    except NotFound as error:
        raise NotFound(f"{no_start}, and {error}; `relight instances` and `relight models` list both") from error


def explanation(told: dict[str, Any]) -> None:
    """One start in words, then every mode with its price and with what it took."""
    said = "ready" if told["ok"] else "failed"
    _line(f"{told['instance']} of {told['model']}: {said} by {told['mode']} ({told['way']}) in {told['seconds']:.3f} s")
    if told["predicted_seconds"] is not None:
        error = told["prediction_error"]
        off = f", {error:.0%} off" if error is not None else ""
        _line(f"  predicted: {told['predicted_seconds']:.3f} s{off}")
    _line(f"  why: {told['why'] or 'nobody planned it: it was adopted, or restarted where it stood'}")
    if told["planned_mode"] not in (None, told["mode"]):
        _line(f"  planned was {told['planned_mode']}; the agent started it by {told['mode']}")
    if not told["ok"]:
        _line(f"  failed: {told['outcome']}")
    if told["process"]:
        _line(f"  process: {told['process']}")
    if told["cache"]:
        _line(f"  compile cache: {cached(told['cache'])}")
    for rung in told["rungs"]:
        mark = "took" if rung["ok"] else "failed"
        _line(f"  rung {rung['kind']} {mark} ({rung['seconds']:.3f} s): {rung['reason']}")
    for phase in told["phases"][:LONGEST]:
        knob = f"; shorter by: {phase['knob']}" if phase["knob"] else ""
        _line(f"  {phase['share']:.0%} {phase['name']} ({phase['seconds']:.3f} s): {phase['what']}{knob}")
    columns = [
        ("MODE", "mode"), ("TAKEN", "chosen"), ("FITS", "fits"), ("PREDICTED S", "predicted_seconds"),
        ("MEASURED S", "measured_seconds"), ("STARTS", "starts"), ("REASON", "reason"),
    ]  # fmt: skip
    emit(told["modes"], "table", columns)
    comparison(told["comparison"])


def comparison(told: dict[str, Any]) -> None:
    """What became slower since the last good start like it."""
    if not told["baseline"]:
        _line(f"  compared with nothing: {told['why']}")
        return
    whole = f"{told['before_seconds']:.3f} s then, {told['seconds']:.3f} s now"
    slower = [p for p in told["phases"] if p["regressed"]]
    _line(f"  compared with {told['baseline']}: {whole}; {len(slower)} phase(s) regressed")
    for phase in slower:
        before, now = phase["before_seconds"], phase["seconds"]
        share = f" ({phase['change_seconds'] / before:+.0%})" if before > 0 else " (new)"
        _line(f"  regressed: {phase['name']} {before:.3f} s -> {now:.3f} s, {phase['change_seconds']:+.3f} s{share}")


def _line(text: str) -> None:
    console.print(text, highlight=False, markup=False)


def decisions(told: dict[str, Any], model: str) -> None:
    """What the built-in autoscaler decided, the newest first."""
    if not told["enabled"]:
        _line(
            f"the built-in autoscaler does not write the number of {model}: `autoscaler.enabled` of its specification"
        )
        return
    if not told["decisions"]:
        _line(f"nothing was decided of {model} yet")
        return
    for each in told["decisions"]:
        each["time"] = when(each["at"])
        each["why"] = f"{each['reason']}; not written: {each['error']}" if each["error"] else each["reason"]
    columns = [
        ("TIME", "time"), ("ACTION", "action"), ("FROM", "written"), ("TO", "number"), ("TARGET", "target"),
        ("HELD", "held"), ("IN FLIGHT", "in_flight"), ("READY", "ready"), ("COMING", "coming"),
        ("OVERDUE", "overdue"), ("WHY", "why"),
    ]  # fmt: skip
    emit(told["decisions"], "table", columns)


def findings(told: list[dict[str, Any]]) -> None:
    """What the doctor says, the worst first."""
    for each in told:
        _line(f"{each['severity'].upper()} {each['about']}: {each['title']}")
        _line(f"  seen: {each['evidence']}")
        _line(f"  cost: {each['cost']}")
        _line(f"  do: {each['fix']}")
    if not told:
        _line("nothing to say")
