"""Every metric of every component, as its registry has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from relight.agent import metrics as agent
from relight.controller import metrics as controller
from relight.gateway import metrics as gateway


@dataclass(frozen=True, slots=True)
class Exposed:
    """One metric family. `name` is the one that queries use (a counter's ends in `_total`), `by` the component."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    told: str
    by: str
    buckets: tuple[float, ...] = ()


def registries() -> Mapping[str, CollectorRegistry]:
    """By component, in the order of the page."""
    return {
        "controller": controller.Metrics().registry,
        "gateway": gateway.Metrics(tuple, lambda: False).registry,
        "agent": agent.Metrics(tuple, dict, lambda: False).registry,
    }


def inventory() -> tuple[Exposed, ...]:
    """All metrics, by component and name."""
    found = [exposed for by, registry in registries().items() for exposed in _of(registry, by)]
    order = list(registries())
    return tuple(sorted(found, key=lambda e: (order.index(e.by), e.name)))


def _of(registry: CollectorRegistry, by: str) -> Iterator[Exposed]:
    # The library shows label names nowhere else than in these attributes.
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            (family,) = collector.describe()
            labels = tuple(collector._labelnames)
            buckets = tuple(bound for bound in getattr(collector, "_upper_bounds", ()) if bound != float("inf"))
            yield _exposed(family, labels, by, buckets)
        else:
            for family in collector.collect():
                yield _exposed(family, tuple(family._labelnames), by, ())


def _exposed(family: object, labels: tuple[str, ...], by: str, buckets: tuple[float, ...]) -> Exposed:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Exposed(name, family.type, family.unit, labels, family.documentation, by, buckets)
