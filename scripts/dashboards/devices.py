"""The dashboard of devices: what their memory is held for, and what they say of themselves."""

from __future__ import annotations

from .grafana import Dashboard, Panel, Query, Row, Unit

_MEMORY = Row(
    "Memory",
    (
        Panel(
            "Device memory by what it is held for",
            "Over all devices. Guardians hold little; orphans are processes of instances that do not run.",
            Unit.BYTES,
            (Query("sum by (kind) (relight_device_memory_bytes)", "{{kind}}"),),
            width=12,
            stacked=True,
        ),
        Panel(
            "Orphan memory",
            "Held by processes that no instance accounts for: the device is out of use until it is free.",
            Unit.BYTES,
            (
                Query(
                    'sum by (instance, device) (relight_device_memory_bytes{kind="orphan"})', "{{instance}} {{device}}"
                ),
            ),
            width=12,
        ),
        Panel(
            "Memory in use",
            "Share of each device that is not free.",
            Unit.RATIO,
            (
                Query(
                    '1 - sum by (instance, device) (relight_device_memory_bytes{kind="free"})'
                    " / sum by (instance, device) (relight_device_memory_bytes)",
                    "{{instance}} {{device}}",
                ),
            ),
        ),
        Panel(
            "What guardians keep",
            "Memory of sleepers, by device.",
            Unit.BYTES,
            (
                Query(
                    'sum by (instance, device) (relight_device_memory_bytes{kind="guardian"})',
                    "{{instance}} {{device}}",
                ),
            ),
        ),
        Panel(
            "KV cache",
            "Resident now.",
            Unit.BYTES,
            (
                Query(
                    'sum by (instance, device) (relight_device_memory_bytes{kind="kv_cache"})',
                    "{{instance}} {{device}}",
                ),
            ),
        ),
    ),
)

_STATE = Row(
    "State",
    (
        Panel(
            "Utilisation",
            "Share of time that the device was busy.",
            Unit.RATIO,
            (Query("max by (instance, device) (relight_device_utilisation_ratio)", "{{instance}} {{device}}"),),
        ),
        Panel(
            "Temperature",
            "As accelerators tell it; CPU cores do not.",
            Unit.CELSIUS,
            (Query("max by (instance, device) (relight_device_temperature_celsius)", "{{instance}} {{device}}"),),
            device_only=True,
        ),
        Panel(
            "Power",
            "As accelerators tell it; CPU cores do not.",
            Unit.WATTS,
            (Query("max by (instance, device) (relight_device_power_watts)", "{{instance}} {{device}}"),),
            device_only=True,
        ),
        Panel(
            "Uncorrected memory errors",
            "Since the driver was loaded. One that grows is a device to take out.",
            Unit.COUNT,
            (Query("max by (instance, device) (relight_device_ecc_errors)", "{{instance}} {{device}}"),),
            device_only=True,
        ),
        Panel(
            "PCIe lanes in use",
            "Of those that the device could use. Below 1 it is seated badly, or its slot is too narrow.",
            Unit.RATIO,
            (Query("min by (instance, device) (relight_device_pcie_lanes_ratio)", "{{instance}} {{device}}"),),
            device_only=True,
        ),
        Panel(
            "Devices by health",
            "One that is not healthy is offered to nobody; `relight status` says why.",
            Unit.COUNT,
            (Query("sum by (kind, healthy) (relight_devices)", "{{kind}} healthy={{healthy}}"),),
            stacked=True,
        ),
        Panel(
            "Devices by product",
            "As their agents found them.",
            Unit.COUNT,
            (Query("count by (kind, product) (relight_device_info)", "{{kind}} {{product}}"),),
            single=True,
        ),
    ),
)

DEVICES = Dashboard(
    "relight-devices", "Relight / Devices", "What devices hold, and how they are.", (_MEMORY, _STATE)
)  # fmt: skip
