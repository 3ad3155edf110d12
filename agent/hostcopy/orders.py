"""What a copy's process is asked, checked field by field: it listens to its owner alone, but trusts no spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relight.core.errors import FieldError, InvalidInput
from relight.core.hosting import PREFIX
from relight.core.ids import is_name
from relight.core.records import HostContent, Rung, RungKind, SourceRef

MAX_LINE = 1 << 20
CONTROL, PAGES = "c", "s"
"""Sockets in a copy's directory: short names, because the path of a socket is short."""
READABLE = frozenset({"shm", "tcp"})
"""Transports that a copy is read by; RDMA needs a registered card, which an engine has."""
_TEXTS = ("model", "revision", "runtime", "engine_version", "device_kind")
_SOURCE = ("instance", "slot", "manifest_digest", "content_digest", "address", "grant")


@dataclass(frozen=True, slots=True)
class Fill:
    """Read this content by one of these rungs, in order; it may take `most_bytes` of memory."""

    content: HostContent
    most_bytes: int
    rungs: tuple[Rung, ...]


def dump(order: Fill) -> dict[str, Any]:
    """As `parse` takes it."""
    return {
        "content": {name: getattr(order.content, name) for name in _TEXTS},
        "most_bytes": order.most_bytes,
        "rungs": [
            {
                "kind": str(rung.kind),
                "sources": [
                    {"generation": s.generation, **{n: getattr(s, n) for n in _SOURCE}}
                    for s in (rung.source, *rung.helpers)
                    if s is not None
                ],
            }
            for rung in order.rungs
        ],
    }


def parse(raw: object) -> Fill:
    """Raises InvalidInput naming every wrong field."""
    wrong: list[FieldError] = []
    whole = _fields(raw, "fill", ("content", "most_bytes", "rungs"), wrong)
    said = _fields(whole.get("content"), "content", _TEXTS, wrong)
    texts = [_text(said.get(name), f"content.{name}", wrong) for name in _TEXTS]
    if not texts[0] or not texts[1]:
        wrong.append(FieldError("content", "a model and a revision", repr(texts[:2])))
    most = _number(whole.get("most_bytes"), "most_bytes", 1, wrong)
    rungs = []
    listed = whole.get("rungs")
    if not isinstance(listed, list) or not listed or len(listed) > len(RungKind):
        wrong.append(FieldError("rungs", f"1 to {len(RungKind)} rungs", repr(listed)[:80]))
        listed = []
    for n, one in enumerate(listed):
        rungs += _rung(one, f"rungs.{n}", wrong)
    if wrong:
        raise InvalidInput("not an order for a host copy", wrong)
    return Fill(HostContent(*texts), most, tuple(rungs))


def named(name: str) -> str:
    """`name`, if a copy may have it. Raises InvalidInput."""
    if not name.startswith(PREFIX) or not is_name(name):
        raise InvalidInput(
            "not a host copy", [FieldError("copy", f"a name that begins with {PREFIX}", repr(name)[:80])]
        )
    return name


def _rung(raw: object, where: str, wrong: list[FieldError]) -> list[Rung]:
    said = _fields(raw, where, ("kind", "sources"), wrong)
    kind = next((k for k in RungKind if k == said.get("kind") and k.transport in READABLE), None)
    if kind is None:
        wrong.append(FieldError(f"{where}.kind", "a rung by shm or tcp", repr(said.get("kind"))[:80]))
    listed = said.get("sources")
    if not isinstance(listed, list) or not 1 <= len(listed) <= 64:
        wrong.append(FieldError(f"{where}.sources", "1 to 64 sources", repr(listed)[:80]))
        return []
    sources = []
    for n, one in enumerate(listed):
        at = f"{where}.sources.{n}"
        fields = _fields(one, at, (*_SOURCE, "generation"), wrong)
        texts = {name: _text(fields.get(name), f"{at}.{name}", wrong) for name in _SOURCE}
        generation = _number(fields.get("generation"), f"{at}.generation", 0, wrong)
        sources.append(
            SourceRef(
                texts["instance"], texts["slot"], generation, texts["manifest_digest"], texts["content_digest"],
                texts["address"], texts["grant"],
            )
        )  # fmt: skip
    return [Rung(kind, "", sources[0], tuple(sources[1:]))] if kind else []


def _fields(raw: object, where: str, names: tuple[str, ...], wrong: list[FieldError]) -> Mapping[str, object]:
    if not isinstance(raw, dict) or set(raw) != set(names):
        wrong.append(FieldError(where, f"an object with {', '.join(names)}", repr(raw)[:80]))
        return {}
    return raw


def _text(value: object, where: str, wrong: list[FieldError]) -> str:
    if not isinstance(value, str) or len(value) > 1 << 16:
        wrong.append(FieldError(where, "a text", repr(value)[:80]))
        return ""
    return value


def _number(value: object, where: str, least: int, wrong: list[FieldError]) -> int:
    if type(value) is not int or not least <= value <= 1 << 62:
        wrong.append(FieldError(where, f"a whole number, at least {least}", repr(value)[:80]))
        return least
    return value
