"""The routes as last told: which model a client means, and which replica a request goes to. Pure: zero I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from relight.core.errors import FieldError, InvalidInput, NotFound
from relight.core.records import RouteModel, RouteReplica, RouteTable

Key = tuple[str, int]
"""(instance, incarnation): what in-flight requests are counted by."""


def key_of(replica: RouteReplica) -> Key:
    """What its requests are counted by."""
    return replica.instance, replica.incarnation


@dataclass(frozen=True, slots=True)
class Names:
    """Every name that clients may use, resolved once per table."""

    by_name: Mapping[str, tuple[RouteModel, ...]]

    @classmethod
    def of(cls, table: RouteTable) -> Names:
        """A model answers to `namespace/name`, its bare name, its served names and those of its adapters."""
        found: dict[str, list[RouteModel]] = {}
        for model in table.models:
            for name in {f"{model.namespace}/{model.name}", model.name, *model.served_names, *model.adapters}:
                found.setdefault(name, []).append(model)
        return cls({name: tuple(models) for name, models in found.items()})

    def resolve(self, name: str) -> RouteModel:
        """Raises NotFound for an unknown name, InvalidInput for one that several namespaces use."""
        models = self.by_name.get(name, ())
        if not models:
            raise NotFound(f"the model {name[:120]!r} does not exist")
        if len(models) > 1:
            choices = " or ".join(sorted(f"{m.namespace}/{m.name}" for m in models))
            raise InvalidInput("the model is ambiguous", [FieldError("model", choices, repr(name))])
        return models[0]

    def public(self) -> list[tuple[str, RouteModel]]:
        """(id, model) for the list of models, sorted; an ambiguous name is left out."""
        return [(name, models[0]) for name, models in sorted(self.by_name.items()) if len(models) == 1]


def choose(
    replicas: Collection[RouteReplica], in_flight: Mapping[Key, int], avoid: Collection[Key], turn: int
) -> RouteReplica | None:
    """The replica with the fewest requests of ours, none of `avoid`; `turn` rotates between equals."""
    able = [r for r in replicas if key_of(r) not in avoid]
    if not able:
        return None
    least = min(in_flight.get(key_of(r), 0) for r in able)
    equal = [r for r in able if in_flight.get(key_of(r), 0) == least]
    return equal[turn % len(equal)]
