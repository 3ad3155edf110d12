"""What is seen of a slot that could be better: each function is a rule of rules.toml, and returns its evidence or "".

Pure, and silent about what is not known.
"""

from __future__ import annotations

from relight.controller.doctor.case import SlotCase


def pcie_below_its_best(case: SlotCase) -> str:
    # An idle device lowers its generation by itself; lanes that are missing are missing.
    told = [
        f"{d.id}: {d.pcie.width} of {d.pcie.best_width} lanes"
        for d in case.slot.devices
        if d.pcie is not None and d.pcie.width < d.pcie.best_width
    ]
    return "; ".join(told)


def card_far_from_device(case: SlotCase) -> str:
    told = [f"{d.id}: {d.nic} ({d.nic_distance})" for d in case.slot.devices if d.nic_distance in ("NODE", "SYS")]
    return "; ".join(told)


def tcp_where_rdma_could_be(case: SlotCase) -> str:
    trouble = case.slot.transports.get("rdma", "")
    return f"the slot has RDMA cards and cannot use them: {trouble}" if trouble else ""


def locked_memory_too_small(case: SlotCase) -> str:
    limit = case.slot.facts.get("memlock", "")
    most = max((d.total_bytes for d in case.slot.devices), default=0)
    if "rdma" not in case.slot.transports or not limit.isdigit() or int(limit) >= most:
        return ""
    return f"{int(limit) >> 10} KiB may be locked, and weights of up to {most >> 30} GiB are registered with cards"


def device_of_two_slots(case: SlotCase) -> str:
    return "; ".join(f"{device}: also of {', '.join(others)}" for device, others in sorted(case.shared_with.items()))


def device_held_by_others(case: SlotCase) -> str:
    return "; ".join(f"{d.id}: {d.reason}" for d in case.slot.devices if not d.healthy and d.reason)


def cache_nearly_full(case: SlotCase) -> str:
    cache = case.slot.cache
    if cache is None or not cache.quota or cache.bytes < 0.95 * cache.quota:
        return ""
    return f"{cache.bytes >> 20} of {cache.quota >> 20} MiB of bundles"


IMAGES_SECONDS = 10.0
"""What a container that finds its image on the node takes at most, with a margin."""


def images_not_there_beforehand(case: SlotCase) -> str:
    waited = case.slot.images_seconds
    return f"its containers waited {waited:.0f} s for their images" if waited >= IMAGES_SECONDS else ""


def versions_do_not_match(case: SlotCase) -> str:
    return "; ".join(
        f"{name.partition('/')[2]}: {told}"
        for name, told in sorted(case.slot.facts.items())
        if name.startswith(("refused/", "mismatch/"))
    )


def version_locks_ignored(case: SlotCase) -> str:
    return case.slot.facts.get("ignored_locks", "")
