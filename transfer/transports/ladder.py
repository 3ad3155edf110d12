"""Which transports may carry bytes between two members, the fastest first. Pure: what is there is told, not asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Between:
    """What lies between a source and a receiver.

    `device` is the vendor of the accelerator whose memory both sides have the weights in, "" for memory of the host.
    `linked`: their devices reach each other directly (transfer/topology.py). `cards`: both have a usable RDMA card.
    `nixl`: both have a wheel of NIXL.
    """

    same_host: bool
    device: str = ""
    linked: bool = False
    cards: bool = False
    nixl: bool = False


def order(between: Between) -> tuple[str, ...]:
    """Kinds of transports, the fastest first; empty when there is none, as between devices without link or card.

    NIXL comes before verbs on NVIDIA alone: it brings GPUDirect with several lanes there; of other vendors' devices it
    knows nothing.
    """
    found = []
    if between.same_host:
        if not between.device:
            found.append("shm")
        elif between.device == "nvidia" and between.linked:
            found.append("nvlink")
    if between.cards:
        if between.device == "nvidia" and between.nixl:
            found.append("nixl")
        found.append("rdma")
    if not between.device:
        found.append("tcp")
    return tuple(found)
