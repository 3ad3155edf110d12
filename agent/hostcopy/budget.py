"""Which copies fit into a slot's budget of host memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one wanted copy takes, or would take; a higher `turn` was wanted later."""

    copy: str
    bytes: int
    turn: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of the copies that fit, and why the others do not."""

    kept: frozenset[str]
    refused: Mapping[str, str]


def choose(claims: Iterable[Claim], budget: int) -> Choice:
    """Those wanted last come first, so that the least recently wanted go when it grows tight."""
    left = budget
    kept, refused = set[str](), dict[str, str]()
    for claim in sorted(claims, key=lambda c: (-c.turn, c.copy)):
        if claim.bytes <= left:
            kept.add(claim.copy)
            left -= claim.bytes
        else:
            refused[claim.copy] = f"it takes {claim.bytes} bytes, and {left} of {budget} are left"
    return Choice(frozenset(kept), refused)
