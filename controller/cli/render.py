"""How the CLI shows things: tables for people, stable JSON for scripts, waterfalls for starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relight.core.errors import FieldError, InvalidInput

WIDE = 200
"""Columns of a table that goes into a pipe or file: nothing is folded that need not be."""
console = Console(width=None if sys.stdout.isatty() else WIDE)
WIDTH = 48
"""Characters of a waterfall's bar."""


def emit(data: object, output: str, columns: Sequence[tuple[str, str]] = ()) -> None:
    """Prints `data` as JSON, or as a table with (heading, dotted path) columns."""
    if output == "json":
        typer.echo(json.dumps(data, indent=2, sort_keys=True))
        return
    rows = data if isinstance(data, list) else [data]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, _ in columns:
        # Names and numbers stay whole; what is told in words takes the room that is left.
        words = heading in ("REASON", "WHY", "HELD BY") or not heading.isupper()
        table.add_column(heading, overflow="fold", no_wrap=not words)
    for row in rows:
        table.add_row(*(Text(show(pick(row, path))) for _, path in columns))
    console.print(table)


def pick(row: Any, path: str) -> Any:
    """The value at a dotted path, or None."""
    for step in path.split("."):
        row = row.get(step) if isinstance(row, dict) else None
    return row


def show(value: Any) -> str:
    """A cell's text; `-` for nothing."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return ", ".join(show(v) for v in value)
    return str(value)


def size(count: float | None) -> str:
    """Bytes for people."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def when(at: float) -> str:
    """A time of day for people, in UTC; `-` for never."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}" if at else "-"


def merged(phases: Iterable[dict[str, Any]], begin: float, end: float) -> float:
    """Seconds of [begin, end] that the phases cover, overlaps counted once."""
    covered, reached = 0.0, begin
    for phase in sorted(phases, key=lambda p: float(p["start"])):
        low, high = max(float(phase["start"]), reached), min(float(phase["end"]), end)
        if high > low:
            covered += high - low
            reached = high
    return covered


def waterfall(timeline: dict[str, Any]) -> None:
    """One start: every phase as a bar on the common time axis, the rungs, and how much time is accounted for."""
    phases = timeline["phases"]
    begin = min((float(p["start"]) for p in phases), default=float(timeline["begun_at"]))
    end = max((float(p["end"]) for p in phases), default=float(timeline["ended_at"]))
    total = max(end - begin, 1e-9)
    said = "proven" if timeline.get("ok") else "failed"
    console.print(
        f"{timeline['instance']} incarnation {timeline['incarnation']} of {timeline['model']}: {said} in "
        f"{total:.3f} s by {timeline['mode']}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("phase", "begins", "takes", "", "detail"):
        table.add_column(heading, justify="right" if heading in ("begins", "takes") else "left", overflow="fold")
    for phase in phases:
        low = (float(phase["start"]) - begin) / total
        high = (float(phase["end"]) - begin) / total
        left = min(int(low * WIDTH), WIDTH - 1)
        bar = " " * left + "#" * max(round((high - low) * WIDTH), 1)
        took = float(phase["end"]) - float(phase["start"])
        table.add_row(
            phase["name"], f"{low * total * 1e3:.1f} ms", f"{took * 1e3:.1f} ms", Text(bar[:WIDTH].ljust(WIDTH)),
            Text(str(phase.get("detail", ""))),
        )  # fmt: skip
    console.print(table)
    for rung in timeline.get("rungs", ()):
        mark = "took" if rung["ok"] else "failed"
        console.print(f"  rung {rung['kind']} {mark} ({rung['seconds']:.3f} s): {rung['reason']}", highlight=False)
        if len(rung.get("brought", {})) > 1:
            told = ", ".join(f"{size(count)} from {name}" for name, count in rung["brought"].items())
            console.print(f"    {told}", highlight=False)
        if rung.get("deal"):
            console.print(f"    {rung['deal']}", highlight=False)
    console.print(f"  accounted for: {merged(phases, begin, end) / total:.1%} of {total:.3f} s", highlight=False)
    if timeline.get("cache"):
        console.print(f"  compile cache: {cached(timeline['cache'])}", highlight=False)
    predicted = timeline.get("predicted_seconds")
    if predicted is not None:
        console.print(f"  predicted: {predicted:.3f} s", highlight=False)


def trace(data: object, file: Path | None) -> None:
    """A trace for another tool, into a file or to standard output. Raises InvalidInput when it cannot be written."""
    text = json.dumps(data, indent=1) + "\n"
    if file is None:
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text)
    except OSError as error:
        wrong = FieldError("--file", "a file that can be written", f"{file} ({error.strerror})")
        raise InvalidInput("nothing was written", [wrong]) from error


def cached(record: dict[str, Any]) -> str:
    """What the compile-cache ring did for a start, in one line."""
    parts = [f"{record['verdict']}: {record['reason']}"]
    if record.get("saved_seconds") is not None:
        parts.append(f"saved {record['saved_seconds']:.1f} s")
    if record["published"]:
        parts.append(f"published on {', '.join(record['published'])}")
    parts += [f"{name.replace('_', ' ')}: {record[name]}" for name in ("not_published", "quarantined") if record[name]]
    parts += [f"changed {each}" for each in record["changed"][:3]]
    return "; ".join([*parts, f"key {record['key'] or '-'}"])


def note(text: str) -> None:
    """One line of progress, on standard error so that standard output stays for results."""
    print(text, file=sys.stderr, flush=True)
