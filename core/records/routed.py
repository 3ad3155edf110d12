"""What controller and gateways tell each other: routes, demand, and phases that only a gateway sees. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteReplica:
    """A replica that may be given requests: only ready instances are ever listed."""

    instance: str
    incarnation: int
    url: str
    served_name: str


@dataclass(frozen=True, slots=True)
class RouteModel:
    """One known model for the gateway: where it answers, and what may be expected when nowhere."""

    namespace: str
    name: str
    served_names: tuple[str, ...]
    replicas: tuple[RouteReplica, ...]
    coming: int
    can_come: bool
    next_ready_seconds: float | None = None
    reason: str = ""
    adapters: tuple[str, ...] = ()
    """Names that the engines themselves know, beside the one that each has for the model."""


@dataclass(frozen=True, slots=True)
class RouteTable:
    """What the gateway routes by, sent whole at each change."""

    revision: int
    models: tuple[RouteModel, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayModel:
    """One model's demand at one gateway."""

    namespace: str
    name: str
    held: int
    oldest_held_seconds: float
    in_flight: int
    last_request_at: float


@dataclass(frozen=True, slots=True)
class GatewayInstance:
    """Requests of one incarnation that one gateway still has open."""

    instance: str
    incarnation: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class GatewaySpan:
    """A phase that only the gateway sees (`route`, `first_token`) of the first request of an incarnation."""

    instance: str
    incarnation: int
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """One gateway's view, sent whole; `route_revision` acknowledges the table it routes by."""

    gateway: str
    route_revision: int
    models: tuple[GatewayModel, ...] = ()
    instances: tuple[GatewayInstance, ...] = ()
    spans: tuple[GatewaySpan, ...] = ()
