"""Which variables tell an engine the devices that it may use, and what it compiles for. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relight.agent.devices.base import Device

_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    # The vendor's runtime reads the first, the CUDA that it stands in for the second.
    "kunlun": ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
ALL = tuple(sorted({name for names in _VARIABLES.values() for name in names}))


def environment(devices: Sequence[Device]) -> dict[str, str]:
    """All variables of the devices' kind, each with all of them; nothing for kinds without."""
    if not devices:
        return {}
    said = ",".join(getattr(device, "visible_as", "") or device.id for device in devices)
    return dict.fromkeys(_VARIABLES.get(devices[0].kind, ()), said)


def compiled_for(devices: Sequence[Device], processor: Mapping[str, str]) -> Mapping[str, str]:
    """The device part of a compile key: the accelerator beside the processor, where there is one."""
    models = sorted({device.model_name or device.kind for device in devices if device.kind != "cpu"})
    return {**processor, "kind": devices[0].kind, "accelerator": ", ".join(models)} if models else processor
