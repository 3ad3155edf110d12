"""Which metrics and labels a PromQL expression names, and whether there are such."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .inventory import Exposed

_NAME = re.compile(r"\b(?:[a-z]+:)?relight[a-z0-9_:]*")
_SELECTOR = re.compile(r"\b((?:[a-z]+:)?relight[a-z0-9_:]*)\{([^}]*)\}")
_MATCHER = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")
_PARTS = ("_bucket", "_sum", "_count")
TARGET_LABELS = frozenset({"instance", "job", "le"})
"""What a scrape adds, and what belongs to buckets."""


class UnknownName(ValueError):
    """An expression names what no registry and no recording rule has."""


def names(expression: str) -> list[str]:
    """The metric families and recorded series of an expression."""
    return list(dict.fromkeys(_NAME.findall(expression)))


def check(expression: str, metrics: Iterable[Exposed], recorded: Iterable[str] = ()) -> None:
    """Raises UnknownName for a metric that nothing exposes or records, and for a label that it does not have."""
    known = {metric.name: metric for metric in metrics}
    rules = set(recorded)
    for name in names(expression):
        if name not in rules and _family(name, known) is None:
            raise UnknownName(f"{name}: no registry and no recording rule has it, in {expression!r}")
    for name, selector in _SELECTOR.findall(expression):
        family = _family(name, known)
        for label in _MATCHER.findall(selector):
            if family is not None and label not in {*family.labels, *TARGET_LABELS}:
                raise UnknownName(f"{label}: {name} has {', '.join(family.labels) or 'no labels'}, in {expression!r}")
    labels = {label for metric in known.values() for label in metric.labels} | TARGET_LABELS
    for label in _grouped(expression):
        if label not in labels:
            raise UnknownName(f"{label}: no metric has this label, in {expression!r}")


def _grouped(expression: str) -> Iterator[str]:
    for group in _GROUPING.findall(expression):
        yield from (label.strip() for label in group.split(",") if label.strip())


def _family(name: str, known: dict[str, Exposed]) -> Exposed | None:
    if name in known:
        return known[name]
    for part in _PARTS:
        family = known.get(name.removesuffix(part)) if name.endswith(part) else None
        if family is not None and family.kind == "histogram":
            return family
    return None
