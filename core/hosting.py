"""What a copy of the host tier takes and how it is named: known to controller and agents alike. No I/O."""

from __future__ import annotations

from relight.core.fingerprint import digest
from relight.core.records import HostContent

PREFIX = "host-"
"""Names of copies begin so: none is mistaken for an engine."""
_STEP = 2 << 20
"""Memory is taken in huge pages."""


def room_for(weight_bytes: int) -> int:
    """Bytes to set aside for weights of which only the sum is known: padding and whole pages come on top."""
    padded = weight_bytes + weight_bytes // 16
    return -(-padded // _STEP) * _STEP + _STEP


def copy_name(slot: str, content: HostContent) -> str:
    """The name of the copy of `content` on `slot`: a copy of anything else, or elsewhere, has another."""
    fields = {name: str(getattr(content, name)) for name in HostContent.__dataclass_fields__}
    return PREFIX + digest({"slot": slot, **fields})[:16]
