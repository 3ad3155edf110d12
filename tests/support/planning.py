"""Slots and instances as the planner sees them, for tests of plans."""

from relight.core.fingerprint import Fingerprint, digest
from relight.core.records import (
    Desired,
    DeviceReport,
    Endpoint,
    Guardians,
    HostReport,
    InstanceReport,
    InstanceView,
    MemberView,
    Mode,
    ModelSpec,
    SlotView,
    SourceOffer,
)
from relight.core.states import State

SPEC = ModelSpec("default", "m", "/m", "r1", "stub", replicas=2, guardians=Guardians(1, 2))
DEVICE = DeviceReport("d0", "cpu", "d0", 1 << 30, 0)


def slot(name, boot="boot", force_tcp=False, devices=(DEVICE,), transports=None, budget=None, copies=(), pool=""):
    tier = None if budget is None else HostReport(budget, tuple(copies))
    return SlotView(name, True, boot, force_tcp, {"stub": "1"}, devices, transports or {}, host_tier=tier, pool=pool)


def offers(*transports, **closed):
    return SourceOffer(1, "d", "c", "", {t: f"{t}:h:1" for t in transports}, 1 << 20, closed, "ab")


def relays(*transports, host="h", layout="bf16"):
    """What a sleeper offers to those that are filled at the same time."""
    addresses = {t: f"{'unix:/' if t == 'shm' else f'{t}:'}{host}:1" for t in transports}
    return SourceOffer(1, "", "", digest({"dtype": layout}), addresses, 0, {}, "cd")


def instance(name, where, state, spec=SPEC, layout="bf16", level=2, offer=None, relay=None, **changes):
    ready = state is State.READY
    desired = Desired.READY if ready else Desired.DORMANT
    report = InstanceReport(
        instance=name, model=spec.key, rank=0, members=1, devices=("d0",), state=state, since=1.0, cause="",
        incarnation=1, level=level, fingerprint=Fingerprint(layout={"dtype": layout}),
        endpoint=Endpoint("http://x", "m") if ready else None,
        source=(offer or offers("shm", "tcp")) if ready else None,
        relay=relay if state is State.DORMANT else None,
    )  # fmt: skip
    values = {
        "instance": name, "model": spec.key, "spec": spec, "members": (MemberView(where, 0, ("d0",), report),),
        "desired": desired, "state": state, "level": level, "operation": "", "mode": Mode.COLD,
    }  # fmt: skip
    return InstanceView(**{**values, **changes})


def kinds(placement):
    return [r.kind for r in placement.rungs]
