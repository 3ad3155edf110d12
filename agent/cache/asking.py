"""What people ask of the ring: list, show, release. Blocking calls."""

from __future__ import annotations

import re
from dataclasses import replace

from relight.agent.cache.ring import Present, Ring
from relight.core.errors import FieldError, InvalidInput, NotFound, Unavailable
from relight.core.records import CacheAnswer, CacheBundle, CacheEntry, CacheQuery

_PREFIX = re.compile("[0-9a-f]{4,32}")


def answer(ring: Ring, query: CacheQuery) -> CacheAnswer:
    """Raises InvalidInput, NotFound, Unavailable (a quarantine that was not ended everywhere comes back)."""
    known = {"list": _list, "show": _show, "release": _release}
    if query.operation not in known:
        raise InvalidInput("no such question", [FieldError("operation", " or ".join(known), query.operation[:40])])
    return known[query.operation](ring, query.key)


def _list(ring: Ring, _: str) -> CacheAnswer:
    heard, silent = ring.listings()
    if silent and not heard:
        raise Unavailable("no cache node answers: " + "; ".join(silent.values()))
    found: dict[tuple[str, str], CacheBundle] = {}
    reasons: dict[str, str] = {}
    for node, listing in sorted(heard.items()):
        for held in listing.holdings:
            before = found.get((held.key, held.bundle))
            found[held.key, held.bundle] = CacheBundle(
                held.key, listing.models.get(held.key, ""), held.bundle, held.bytes,
                max(held.last_use, before.last_use if before else 0.0), (*(before.nodes if before else ()), node),
            )  # fmt: skip
        for record in listing.quarantines:
            reasons.setdefault(record.key, record.reason)
            row = CacheBundle(record.key, listing.models.get(record.key, ""), record.bundle)
            found.setdefault((record.key, record.bundle), row)
    rows = tuple(replace(found[name], quarantine=reasons.get(name[0], "")) for name in sorted(found))
    return CacheAnswer(rows, None, tuple(sorted(heard)), silent)


def _whole(listed: CacheAnswer, text: str) -> str:
    """The one key that begins with `text`."""
    if not _PREFIX.fullmatch(text):
        raise InvalidInput("not a key", [FieldError("key", "4 to 32 hexadecimal digits", repr(text)[:80])])
    found = sorted({b.key for b in listed.bundles if b.key.startswith(text)})
    if not found:
        raise NotFound(f"the ring has no key {text}")
    if len(found) > 1:
        raise InvalidInput("not one key", [FieldError("key", "more digits", f"{text}: {', '.join(found[:5])}")])
    return found[0]


def _show(ring: Ring, text: str) -> CacheAnswer:
    listed = _list(ring, "")
    key = _whole(listed, text)
    row = next(b for b in listed.bundles if b.key == key)
    entry = CacheEntry(key, bundle=row.bundle, nodes=row.nodes, quarantine=row.quarantine)
    if row.nodes:
        with ring.open(Present(row.bundle, row.bytes, row.nodes), use=False) as opened:
            manifest = opened.manifest
            entry = CacheEntry(
                key, manifest.key.fields, row.bundle, row.bytes, len(manifest.files), opened.sealed.signer,
                manifest.built_at, manifest.compile_seconds, row.last_use, row.nodes, row.quarantine,
            )  # fmt: skip
    return CacheAnswer((), entry, listed.nodes, listed.unheard)


def _release(ring: Ring, text: str) -> CacheAnswer:
    listed = _list(ring, "")
    key = _whole(listed, text)
    released = ring.release(key)
    if not released:
        raise NotFound(f"key {key} is not in quarantine")
    return CacheAnswer((), CacheEntry(key), tuple(released), {})
