"""Which kinds of devices there are: each file of this folder that has a KIND. Which of them this host has."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from relight.agent import devices
from relight.agent.devices.base import DeviceBackend, Kind, Wanted
from relight.agent.devices.host import Host
from relight.core.errors import FieldError, InvalidInput

AUTO = "auto"


def known() -> Mapping[str, Kind]:
    """By name."""
    modules = (import_module(f"{devices.__name__}.{m.name}") for m in pkgutil.iter_modules(devices.__path__))
    found = (getattr(module, "KIND", None) for module in modules)
    return {kind.name: kind for kind in found if isinstance(kind, Kind)}


def named(name: str) -> Kind:
    """Raises InvalidInput for a kind that nobody wrote."""
    kinds = known()
    if name not in kinds:
        expected = " or ".join([AUTO, *sorted(kinds)])
        raise InvalidInput("unknown kind of device", [FieldError("accelerators.kind", expected, name)])
    return kinds[name]


def open_devices(name: str, host: Host, wanted: Wanted) -> DeviceBackend:
    """The devices of one kind, `auto` for the only kind of accelerator that this host has.

    Raises InvalidInput when there are none, or several kinds and none was named; Unavailable as the kind says.
    """
    if name != AUTO:
        return named(name).open(host, wanted)
    shown = {kind.name: why for kind in known().values() if (why := kind.there(host))}
    if len(shown) != 1:
        told = "; ".join(f"{kind}: {why}" for kind, why in shown.items()) or "no accelerator of a known kind"
        expected = f"one of {', '.join(sorted(known()))}; `auto` needs exactly one kind on the host"
        raise InvalidInput("no kind of device can be chosen", [FieldError("accelerators.kind", expected, told)])
    return named(next(iter(shown))).open(host, wanted)
