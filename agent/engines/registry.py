"""Engine drivers by name. A driver's class is imported only on slots that configure it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from relight.agent.devices.base import Device
from relight.agent.engines.base import EngineDriver
from relight.agent.surroundings import Surroundings
from relight.core.errors import FieldError, InvalidInput

DRIVERS = {
    "sglang": ("relight.agent.engines.sglang", "SglangDriver"),
    "stub": ("relight.agent.engines.stub", "StubDriver"),
    "vllm": ("relight.agent.engines.vllm", "VllmDriver"),
}


def build(
    engines: Mapping[str, Mapping[str, Any]], devices: tuple[Device, ...], surroundings: Surroundings
) -> dict[str, EngineDriver]:
    """A driver for each configured engine: the slot's devices, where its engines run, and the engine's settings.

    Raises InvalidInput for an unknown engine or settings that the driver does not take.
    """
    found: dict[str, EngineDriver] = {}
    for name, settings in engines.items():
        if name not in DRIVERS:
            known = " or ".join(sorted(DRIVERS))
            raise InvalidInput("unknown engine", [FieldError(f"engines.{name}", known, name)])
        module, driver = DRIVERS[name]
        try:
            found[name] = getattr(import_module(module), driver)(devices, surroundings, **settings)
        except TypeError as error:
            raise InvalidInput(
                "bad engine settings", [FieldError(f"engines.{name}", "settings that it takes", str(error))]
            ) from error
    return found
