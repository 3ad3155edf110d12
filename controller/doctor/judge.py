"""The doctor: rules as data, held against models and slots, the worst first; and where a start's time went, with what
makes each part shorter. No I/O but the package's own data."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from relight.controller.doctor import model_rules, slot_rules
from relight.controller.doctor.case import Finding, ModelCase, Severity, SlotCase
from relight.controller.flight.timeline import GATEWAY, Timeline

ORDER = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule in words; its predicate is the function of its name."""

    name: str
    severity: Severity
    title: str
    cost: str
    fix: str


@dataclass(frozen=True, slots=True)
class RankedPhase:
    """One part of a start: how long it took, what it is, what makes it shorter."""

    name: str
    seconds: float
    share: float
    """Of the whole start; parts may overlap."""
    what: str
    knob: str


@cache
def rules() -> Mapping[str, Rule]:
    """All of them, by name."""
    return {
        name: Rule(name, Severity(told["severity"]), told["title"], told["cost"], told["fix"])
        for name, told in _data("rules.toml").items()
    }


def judge_model(case: ModelCase) -> tuple[Finding, ...]:
    """What could be better of a model."""
    return _judge(case, case.name, model_rules)


def judge_slot(case: SlotCase) -> tuple[Finding, ...]:
    """What could be better of a slot."""
    return _judge(case, case.slot.slot, slot_rules)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Dangers, warnings, advice; each by what it is about."""
    return tuple(sorted(findings, key=lambda f: (ORDER.index(f.severity), f.about, f.rule)))


def rank(timeline: Timeline) -> tuple[RankedPhase, ...]:
    """The parts of a start, the longest first. What a gateway saw is no part of one."""
    took: dict[str, float] = {}
    for phase in timeline.phases:
        if phase.detail != GATEWAY:
            took[phase.name] = took.get(phase.name, 0.0) + max(0.0, phase.end - phase.start)
    whole = max(timeline.ended_at - timeline.begun_at, timeline.seconds, 1e-9)
    knobs = _data("knobs.toml")
    unknown = {"what": "", "knob": ""}
    found = [
        RankedPhase(name, seconds, min(1.0, seconds / whole), **(knobs.get(name) or unknown))
        for name, seconds in took.items()
    ]
    return tuple(sorted(found, key=lambda phase: phase.seconds, reverse=True))


def _judge(case: Any, about: str, module: Any) -> tuple[Finding, ...]:
    found = []
    for rule in rules().values():
        predicate: Callable[[Any], str] | None = getattr(module, rule.name, None)
        if predicate is not None and (evidence := predicate(case)):
            found.append(Finding(rule.name, about, rule.severity, rule.title, evidence, rule.cost, rule.fix))
    return worst_first(found)


@cache
def _data(name: str) -> Mapping[str, Any]:
    return tomllib.loads((files(__package__) / name).read_text())
