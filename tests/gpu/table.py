"""A table for people, and the line of JSON that `make test-gpu` reads behind it."""

from __future__ import annotations

import json
from typing import Any


class Table:
    """Rows of a check: what was measured, and whether what has to hold did."""

    def __init__(self, title: str) -> None:
        self._title, self._rows, self._wrong = title, [("what", "value")], []
        self.figures: dict[str, Any] = {}

    def row(self, what: str, value: float | str, unit: str = "") -> None:
        told = f"{value:.3g} {unit}".strip() if isinstance(value, float) else f"{value} {unit}".strip()
        self._rows.append((what, told))
        self.figures[what] = value

    def must(self, what: str, holds: bool, told: str = "") -> None:
        """A condition; one that does not hold fails the check when the table is shown."""
        self._rows.append((what, "yes" if holds else f"NO {told}".strip()))
        if not holds:
            self._wrong.append(f"{what}: {told}" if told else what)

    def show(self) -> int:
        """Prints table and line; returns the exit status."""
        width = max(len(what) for what, _ in self._rows)
        print(f"\n{self._title}")
        for what, value in self._rows:
            print(f"  {what.ljust(width)}  {value}")
        print(json.dumps({"figures": self.figures, "wrong": self._wrong}), flush=True)
        return 1 if self._wrong else 0
