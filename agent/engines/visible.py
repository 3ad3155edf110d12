"""Which variables tell an engine the devices that it may use, and what it compiles for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relight.agent.devices import base, kinds
from relight.agent.devices.base import Device

ALL = tuple(sorted({variable for kind in kinds.known().values() for variable in kind.variables}))
"""Of all kinds: no model sets them."""


def environment(devices: Sequence[Device]) -> Mapping[str, str]:
    """The variables of the devices' kind, which show exactly these; nothing for kinds without. Raises InvalidInput for
    a kind that nobody wrote."""
    return base.environment(kinds.named(devices[0].kind), devices) if devices else {}


def compiled_for(devices: Sequence[Device], processor: Mapping[str, str]) -> Mapping[str, str]:
    """The device part of a compile key: the accelerator beside the processor, where there is one."""
    models = sorted({device.model_name or device.kind for device in devices if device.kind != "cpu"})
    return {**processor, "kind": devices[0].kind, "accelerator": ", ".join(models)} if models else processor
