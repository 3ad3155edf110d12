"""Which versions of driver, firmware, runtime, engine and plugin go together: data (locks.toml), held against what a
slot tells of itself. No I/O but the package's own data.

Versions of drivers and firmware follow no common rule, so they are compared by their numbers alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from relight.core.errors import FieldError, InvalidInput

ABSENT = "absent"
_SAME = "same:"
_BOUND = re.compile(r"(>=|<=|==|<|>)(.+)")


@dataclass(frozen=True, slots=True)
class Lock:
    """One rule. Empty `kind` or `engine`: for all of them."""

    name: str
    must: str
    """`refuse`: the engine is not offered there; `warn`: it is said."""
    why: str
    source: str
    kind: str = ""
    engine: str = ""
    when: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A lock that is not kept: what is there, and what would match."""

    lock: str
    must: str
    what: str
    got: str
    expected: str
    why: str

    def __str__(self) -> str:
        return f"{self.lock}: {self.what} is {self.got}, and {self.expected} would match: {self.why}"


@cache
def locks() -> tuple[Lock, ...]:
    """All of them."""
    told = tomllib.loads((files("relight.core") / "locks.toml").read_text())
    return tuple(Lock(name, **fields) for name, fields in told.items())


def known(names: Iterable[str]) -> frozenset[str]:
    """The names, for those that are to be ignored. Raises InvalidInput for one that is no lock's."""
    asked, there = frozenset(names), {lock.name for lock in locks()}
    wrong = [FieldError("ignore_locks", f"one of {', '.join(sorted(there))}", name) for name in sorted(asked - there)]
    if wrong:
        raise InvalidInput("unknown version locks", wrong)
    return asked


def mismatches(
    kind: str, engine: str, facts: Mapping[str, str], rules: Iterable[Lock] | None = None
) -> tuple[Mismatch, ...]:
    """The locks that a slot with devices of `kind` does not keep for `engine`. `facts` are versions by name: driver,
    firmware, runtime, the engine's own, and packages beside it. What is not there is not known, and no mismatch."""
    return tuple(
        found
        for lock in (locks() if rules is None else rules)
        if lock.kind in ("", kind) and lock.engine in ("", engine) and _applies(lock, facts)
        for found in _broken(lock, facts)
    )


def _applies(lock: Lock, facts: Mapping[str, str]) -> bool:
    return all(name in facts and keeps(facts[name], wanted, facts) for name, wanted in lock.when.items())


def _broken(lock: Lock, facts: Mapping[str, str]) -> Iterable[Mismatch]:
    for name, wanted in lock.needs.items():
        if name not in facts or (wanted.startswith(_SAME) and wanted[len(_SAME) :] not in facts):
            continue
        if not keeps(facts[name], wanted, facts):
            other = wanted[len(_SAME) :]
            expected = f"{facts[other]}, which {other} is," if wanted.startswith(_SAME) else wanted
            yield Mismatch(lock.name, lock.must, name, facts[name], expected, lock.why)


def keeps(version: str, wanted: str, facts: Mapping[str, str]) -> bool:
    """Whether a version is as wanted (locks.toml says how that is written)."""
    if wanted == ABSENT:
        return False
    if wanted.startswith(_SAME):
        return _numbers(version) == _numbers(facts.get(wanted[len(_SAME) :], ""))
    return all(_fits(version, part.strip()) for part in wanted.split(","))


def _fits(version: str, part: str) -> bool:
    bound = _BOUND.fullmatch(part)
    if bound is None or bound[2].endswith("*"):
        return fnmatchcase(version, bound[2] if bound else part)
    mine, other = _numbers(version), _numbers(bound[2])
    width = max(len(mine), len(other))
    a, b = ((*numbers, *[0] * (width - len(numbers))) for numbers in (mine, other))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[bound[1]]


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers up to how it was built: 0.32.0+cpu and 0.32.0 are one version."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))
