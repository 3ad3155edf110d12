"""What engines can do here, with these devices and versions: read beforehand (capabilities.toml), then learned from
every transition, and kept by the versions that it was seen with. When one of them moves, all of it is unknown again.

Learning is pure (`lessons`, `Known.learn`); the file is this slot's own (`Store`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from relight.core.locks import keeps
from relight.core.logs import get_logger
from relight.core.records import Capability, InstanceReport, Mode, RungKind, StartRecord, Verdict
from relight.core.states import State

_log = get_logger("agent.capabilities")
NAMES = ("sleep_1", "sleep_2", "guardian", "graphs_kept", "lazy", "zygote", "compile_cache", "direct_transfer")
"""Besides these, the rungs by which weights came."""
IN_A_ROW = 2
"""Failures without a success between them that make a capability missing: one may have any cause."""
AGAIN = 24 * 3600.0
"""Seconds after which what is missing may be tried again: its cause may have passed, and nobody else would find out."""
LONGEST = 300
"""Characters of a reason: it travels with every report."""
KEPT = 8
"""Sets of versions whose results are kept: a version that comes back finds them."""
FORKED = "forked"
UNREACHED = "no: "
"""What stands before the reason for which a card does not reach a device's memory (engines/base.py)."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one transition showed. `final`: a single failure says it; `hint`: no number of failures does, since others
    take part."""

    name: str
    ok: bool
    reason: str
    ranks: int = 0
    final: bool = False
    hint: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one capability, and how often it failed in a row."""

    verdict: Verdict
    reason: str
    at: float
    failures: int = 0


@dataclass(slots=True)
class Known:
    """All that was learned for one set of versions of one engine. `doubts` are lazy starts that failed, by model: what
    was at fault a start by another mode then shows."""

    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)

    def learn(self, lesson: Lesson, now: float) -> bool:
        """Takes one lesson in; whether a verdict or its reason changed."""
        place, reason = (lesson.name, lesson.ranks), lesson.reason[:LONGEST]
        old = self.seen.get(place)
        if lesson.ok:
            new = Seen(Verdict.YES, reason, now)
        else:
            failures = (old.failures if old else 0) + 1
            missing = lesson.final or (failures >= IN_A_ROW and not lesson.hint)
            kept = old.verdict if old is not None and old.verdict is Verdict.YES else Verdict.UNKNOWN
            new = Seen(Verdict.NO if missing else kept, reason, now, failures)
        self.seen[place] = new
        return old is None or (old.verdict, old.reason) != (new.verdict, new.reason)


def lessons(kind: str, outcome: str, report: InstanceReport, known: Known, cpu: bool) -> list[Lesson]:
    """What the transition `kind` (start, wake, sleep) of one instance shows; `known` keeps the doubts between them."""
    ranks, record = len(report.devices), report.start
    found: list[Lesson] = []
    if kind == "start" and record is not None and outcome in ("ok", "failed"):
        # What nobody tries again by itself is wrong by its specification, and by every mode.
        final = report.failure is not None and report.failure.retry_after is None
        found += _of_start(record, report.model, ranks, known, doubted=not final)
    if kind == "wake" and outcome == "ok" and record is not None:
        found += [_rung(r.kind, r.ok, r.reason, r.bytes, r.seconds) for r in record.rungs]
        if not cpu and not any(p.name == "graphs" for p in record.phases):
            found.append(Lesson("graphs_kept", True, "a wake was proven, and captured none", ranks))
    if report.state is State.DORMANT and kind in ("start", "sleep") and outcome == "ok" and report.memory is not None:
        left = report.memory
        found.append(Lesson(f"sleep_{report.level}", True, report.cause, ranks))
        measured = f"{left.residual_bytes >> 20} MiB left behind"
        found.append(Lesson("guardian", not left.unsafe, left.unsafe or measured, ranks, final=True))
    if kind == "sleep" and outcome == "failed" and report.failure is not None:
        found.append(Lesson(f"sleep_{report.level}", False, report.failure.reason, ranks))
    return found


def _of_start(record: StartRecord, model: str, ranks: int, known: Known, *, doubted: bool) -> list[Lesson]:
    found = []
    if record.mode is not Mode.COLD and record.process:
        found.append(Lesson("zygote", record.process.startswith(FORKED), record.process, hint=True))
    found += [_rung(r.kind, r.ok, r.reason, r.bytes, r.seconds) for r in record.rungs]
    if record.mode is Mode.LAZY:
        if record.ok:
            known.doubts.pop(model, None)
            took = record.ended_at - record.begun_at
            found.append(Lesson("lazy", True, f"a start took {took:.1f} s and was proven", ranks))
        elif doubted:
            known.doubts[model] = record.reason
    elif record.ok and model in known.doubts:
        # Only now is it the mode's fault: the same model starts without.
        why = f"a start by lazy failed ({known.doubts.pop(model)}), and one by {record.mode} was proven"
        found.append(Lesson("lazy", False, why, ranks, final=True))
    return found


def of_direct(direct: Mapping[str, str]) -> list[Lesson]:
    """What an engine's start found of cards that reach its device's memory, by card; nothing where none was tried."""
    if not direct:
        return []
    told = "; ".join(f"{card}: {way.removeprefix(UNREACHED)}" for card, way in sorted(direct.items()))
    reached = any(not way.startswith(UNREACHED) for way in direct.values())
    return [Lesson("direct_transfer", reached, told, final=True)]


def _rung(kind: RungKind, ok: bool, reason: str, count: int, seconds: float) -> Lesson:
    told = f"{count >> 20} MiB in {seconds:.2f} s" if ok else reason
    return Lesson(str(kind), ok, told, hint=True)


def of_cache(record: StartRecord) -> list[Lesson]:
    """What came of compiled code, which is known a while after the start."""
    cache_ = record.cache
    if cache_ is None or cache_.verdict not in ("hit", "partly", "not-loaded", "not-selected"):
        return []
    return [Lesson("compile_cache", cache_.verdict in ("hit", "partly"), f"{cache_.verdict}: {cache_.reason}")]


def key_of(kind: str, product: str, links: Mapping[tuple[str, str], str], engine: str, facts: Mapping[str, str]) -> str:
    """Names device, driver, firmware, runtime, engine, packages and topology: what results are kept by.

    A topology is how many links of each kind there are: which device is which changes with every allocation.
    """
    counted: dict[str, int] = {}
    for link in links.values():
        counted[link] = counted.get(link, 0) + 1
    own = {
        n: v for n, v in facts.items() if n in ("driver", "firmware", "runtime", engine) or n.startswith(f"{engine}/")
    }
    text = json.dumps([kind, product, sorted(counted.items()), engine, sorted(own.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def merged(kind: str, engine: str, facts: Mapping[str, str], known: Known, now: float) -> tuple[Capability, ...]:
    """What to report of one engine: what was seen here before what was read, unknown for the rest."""
    found = {(c.name, c.ranks): c for c in _seeded(kind, engine, facts)}
    tested = {c.name for c in found.values() if c.verdict is Verdict.YES}
    for (name, ranks), seen in known.seen.items():
        verdict, reason = seen.verdict, seen.reason
        if verdict is Verdict.NO and seen.at + AGAIN <= now:
            if name in tested:
                continue
            verdict, reason = Verdict.UNKNOWN, f"to be tried again: {reason}"
        found[name, ranks] = Capability(engine, name, verdict, reason, ranks, seen.at)
    there = {name for name, _ in found}
    rest = [Capability(engine, n, Verdict.UNKNOWN, "nothing was seen of it yet") for n in NAMES if n not in there]
    return tuple(sorted([*found.values(), *rest], key=lambda c: (c.name, c.ranks)))


def _seeded(kind: str, engine: str, facts: Mapping[str, str]) -> Iterable[Capability]:
    done: set[str] = set()
    for seed in _seeds():
        fits = seed.get("kind") in (None, kind) and seed.get("engine") in (None, engine)
        beside = {**facts, **{n.partition("/")[2]: v for n, v in facts.items() if n.startswith(f"{engine}/")}}
        if not fits or not all(n in beside and keeps(beside[n], w, beside) for n, w in seed.get("when", {}).items()):
            continue
        for verdict in Verdict:
            for name in seed.get(verdict.value, ()):
                if name not in done:
                    done.add(name)
                    yield Capability(engine, name, verdict, seed["reason"])


@cache
def _seeds() -> list[dict[str, Any]]:
    return list(tomllib.loads((files("relight.agent") / "capabilities.toml").read_text())["seed"])


class Store:
    """The slot's file of results, by key. One that cannot be read is begun anew: all of it can be learned again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._all: dict[str, Any] = {}
        try:
            told = json.loads(path.read_text())
            self._all = told if isinstance(told, dict) else {}
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning("capabilities.unreadable", path=str(path), reason=str(error))

    def load(self, key: str) -> Known:
        """What was learned under a key; nothing for a new one."""
        try:
            seen = {
                (entry["name"], int(entry["ranks"])): Seen(
                    Verdict(entry["verdict"]), str(entry["reason"]), float(entry["at"]), int(entry["failures"])
                )
                for entry in self._all.get(key, ())
            }
        except (KeyError, TypeError, ValueError) as error:
            _log.warning("capabilities.unreadable", path=str(self._path), reason=str(error))
            seen = {}
        return Known(seen)

    def save(self, key: str, known: Known) -> None:
        """Replaces what is kept under a key; the oldest keys go."""
        entries = [{"name": n, "ranks": r, **asdict(seen)} for (n, r), seen in sorted(known.seen.items())]
        self._all.pop(key, None)
        self._all[key] = entries
        for old in list(self._all)[:-KEPT]:
            del self._all[old]
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps(self._all))
            os.replace(beside, self._path)
        except OSError as error:
            _log.warning("capabilities.unwritten", path=str(self._path), reason=str(error))


class Capabilities:
    """Those of all engines of this slot."""

    def __init__(self, path: Path) -> None:
        self._store = Store(path)
        self._kind = ""
        self._facts: Mapping[str, str] = {}
        self._keys: dict[str, str] = {}
        self._known: dict[str, Known] = {}
        self._judged: dict[str, int] = {}
        """By instance, the start whose compiled code was taken in."""

    def begin(
        self, kind: str, product: str, links: Mapping[tuple[str, str], str], engines: Iterable[str],
        facts: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Finds what is known for these versions."""
        self._kind, self._facts = kind, facts
        self._keys = {engine: key_of(kind, product, links, engine, facts) for engine in engines}
        self._known = {engine: self._store.load(key) for engine, key in self._keys.items()}

    def over(
        self, kind: str, outcome: str, engine: str, report: InstanceReport, now: float,
        direct: Mapping[str, str] | None = None,
    ) -> bool:  # fmt: skip
        """Takes in one transition that is over, and what the engine found of its `direct` paths; whether anything
        changed."""
        known = self._known.get(engine)
        if known is None:
            return False
        found = of_direct(direct or {}) if kind == "start" and outcome == "ok" else []
        return self._take(engine, [*found, *lessons(kind, outcome, report, known, self._kind == "cpu")], now)

    def cached(self, engine: str, record: StartRecord | None, now: float) -> bool:
        """Takes in what came of a start's compiled code; whether anything changed."""
        if record is None or record.cache is None or engine not in self._known:
            return False
        if self._judged.get(record.instance) == record.incarnation:
            return False
        self._judged[record.instance] = record.incarnation
        return self._take(engine, of_cache(record), now)

    @property
    def remembered(self) -> frozenset[str]:
        """The instances of which a start was taken in."""
        return frozenset(self._judged)

    def remember_only(self, instances: Collection[str]) -> None:
        """The others are gone."""
        for name in self.remembered.difference(instances):
            del self._judged[name]

    def _take(self, engine: str, told: Iterable[Lesson], now: float) -> bool:
        known = self._known[engine]
        # Every lesson counts, whether or not an earlier one changed something.
        changed = [known.learn(lesson, now) for lesson in told]
        if any(changed):
            self._store.save(self._keys[engine], known)
        return any(changed)

    def report(self, now: float) -> tuple[Capability, ...]:
        """All of them."""
        return tuple(
            c for name, known in self._known.items() for c in merged(self._kind, name, self._facts, known, now)
        )
