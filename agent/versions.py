"""What this slot's versions are, and which engines it does not offer because some of them do not go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from relight.core.locks import Mismatch, mismatches
from relight.core.logs import get_logger

_log = get_logger("agent.versions")
REFUSED, MISMATCH, IGNORED = "refused/", "mismatch/", "ignored_locks"
"""Facts of a slot: why an engine is not offered, what does not match and is offered all the same, what was ignored."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Engines that are offered, and the slot's facts with what was found."""

    engines: Mapping[str, str]
    facts: Mapping[str, str]


def check(
    kind: str,
    engines: Mapping[str, str],
    packages: Mapping[str, Mapping[str, str]],
    facts: Mapping[str, str],
    ignored: Collection[str],
) -> Checked:
    """`engines` by name with their versions, `packages` beside each of them, `facts` of devices and host.

    Logs every lock that is not kept, with what would match, and every one that was ignored.
    """
    offered, told = dict(engines), dict(facts)
    passed: set[str] = set()
    for name, version in engines.items():
        beside = packages.get(name, {})
        told |= {f"{name}/{package}": number for package, number in beside.items()}
        broken = mismatches(kind, name, {**facts, **beside, name: version})
        counted = [m for m in broken if m.lock not in ignored]
        for mismatch in broken:
            _say(name, mismatch, mismatch.lock in ignored)
        refused = [m for m in counted if m.must == "refuse"]
        if refused:
            del offered[name]
            told[REFUSED + name] = "; ".join(map(str, refused))
        if others := [m for m in counted if m.must != "refuse"]:
            told[MISMATCH + name] = "; ".join(map(str, others))
        passed |= {m.lock for m in broken} & set(ignored)
    if passed:
        told[IGNORED] = ", ".join(sorted(passed))
    return Checked(offered, told)


def _say(engine: str, mismatch: Mismatch, ignored: bool) -> None:
    event = "locks.ignored" if ignored else f"locks.{mismatch.must}"
    _log.warning(event, engine=engine, lock=mismatch.lock, reason=str(mismatch))
