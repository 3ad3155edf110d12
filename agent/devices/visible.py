"""Which devices a visibility variable names: by index, UUID, prefix of one, or MIG id, in container order. No I/O.

Engines' own runtimes end the list silently at the first entry that they do not know, and call it "no device" later.
Here every entry is resolved, or refused by name with what is visible and what to set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from relight.core.errors import FieldError, InvalidInput

NOTHING = ("", "-1", "void", "none", "nodevfiles")
"""What stands for no device at all."""
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Seen:
    """One device as the driver shows it to this container; a part of one names its `parent`."""

    index: int
    """Among whole devices, in the driver's order; -1 for a part."""
    id: str
    model: str
    parent: str = ""
    old_id: str = ""
    """By which drivers before R470 called a part: MIG-GPU-<uuid>/<instance>/<instance>."""


def entries(value: str | None) -> tuple[str, ...] | None:
    """The entries of a variable; None when it is not set, none of them when it hides everything."""
    if value is None:
        return None
    found = tuple(entry.strip() for entry in value.split(","))
    return () if all(entry.lower() in NOTHING for entry in found) else found


def select(
    seen: Sequence[Seen], wanted: Sequence[str] | None, variable: str, *, counts_by_speed: bool = False
) -> tuple[Seen, ...]:
    """The devices that `wanted` names, in its order; for None all: of a device in parts its parts.

    `counts_by_speed`: the runtime numbers unlike devices by speed and not in the driver's order.
    Raises InvalidInput with one error per entry, or when nothing is visible.
    """
    split = {device.parent for device in seen if device.parent}
    whole = [device for device in seen if not device.parent and device.id not in split]
    parts = [device for device in seen if device.parent]
    usable = [*whole, *parts]
    listed = _listed(usable)
    if not seen:
        expected = f"devices that the driver shows to this container; {variable} can only choose among them"
        raise InvalidInput("no device is visible", [FieldError("devices", expected, "none")])
    if wanted is not None and not wanted:
        expected = f"ids among {listed}, or no {variable} for all of them"
        raise InvalidInput("no device is visible", [FieldError(variable, expected, "one that hides them all")])
    if wanted is None:
        return tuple(usable)
    mixed = counts_by_speed and len({device.model for device in seen if not device.parent}) > 1
    found: list[Seen] = []
    wrong: list[FieldError] = []
    for entry in wanted:
        device, expected = _one(entry, seen, usable, split, mixed)
        if device is None:
            wrong.append(FieldError(variable, f"{expected}; visible are {listed}", repr(entry)))
        elif device in found:
            wrong.append(FieldError(variable, f"each device once ({device.id}); visible are {listed}", repr(entry)))
        else:
            found.append(device)
    if wrong:
        raise InvalidInput("devices that cannot be told", wrong)
    return tuple(found)


def _one(
    entry: str, seen: Sequence[Seen], usable: Sequence[Seen], split: set[str], mixed: bool
) -> tuple[Seen | None, str]:
    if entry.isascii() and entry.isdigit():
        if mixed:
            return None, "a UUID, or CUDA_DEVICE_ORDER=PCI_BUS_ID beside it: unlike devices are numbered by speed"
        device = next((d for d in seen if d.index == int(entry)), None)
        if device is not None and device.id in split:
            return None, f"a part of {device.id}, which is split"
        return device, "an index that is there"
    if _OLD_MIG.fullmatch(entry):
        return next((d for d in usable if d.old_id == entry), None), "a MIG id that is there"
    if not re.match(r"[A-Za-z]", entry):
        return None, "an index, a UUID, a prefix of one, or a MIG id"
    fitting = [d for d in usable if d.id == entry] or [d for d in usable if _begins(d.id, entry)]
    if len(fitting) > 1:
        return None, f"one device; it begins the ids of {', '.join(d.id for d in fitting)}"
    if not fitting and any(_begins(parent, entry) for parent in split):
        return None, "a part of it, since it is split"
    return (fitting[0] if fitting else None), "the id of a device that is there, or its beginning"


def _listed(devices: Sequence[Seen]) -> str:
    return ", ".join(f"{d.index}={d.id}" if d.index >= 0 else d.id for d in devices) or "none"


def must_equal(got: Sequence[Seen], allocated: Sequence[str] | None, count: int | None, where: str) -> None:
    """Refuses to go on where what is visible is not what was allocated: somebody else's device is among it, or lacks.

    `allocated` are ids that whoever gave the devices says it gave, `count` how many. Raises InvalidInput.
    """
    told = ", ".join(device.id for device in got) or "none"
    if count is not None and len(got) != count:
        expected = f"{count}, as many as were allocated"
        raise InvalidInput(
            "visible devices are not those allocated", [FieldError("accelerators.count", expected, told)]
        )
    if allocated is not None:
        missing = [a for a in allocated if not any(_of(d, a) for d in got)]
        beyond = [d.id for d in got if not any(_of(d, a) for a in allocated)]
        if missing or beyond:
            expected = f"exactly {', '.join(allocated)}"
            said = f"{told} ({'lacks ' + ', '.join(missing) if missing else 'more than that: ' + ', '.join(beyond)})"
            raise InvalidInput("visible devices are not those allocated", [FieldError(where, expected, said)])


def _begins(id_: str, beginning: str) -> bool:
    return id_.lower().startswith(beginning.lower())


def _of(device: Seen, allocated: str) -> bool:
    """Whether it is that device, or a part of it."""
    return _begins(device.id, allocated) or _begins(device.parent, allocated)
