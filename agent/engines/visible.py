"""Which variables tell an engine the devices that it may use, and no others. No I/O."""

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
