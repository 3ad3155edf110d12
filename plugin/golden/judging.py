"""How far an engine's numbers may be from the reference, and what is said when they are not. No I/O, no torch.

An error is ||engine - reference|| over ||reference||, of all hidden states behind one layer. What rounds in a dtype's
own way adds up over layers, so a tolerance allows for about thirty of them: float32 differs by the order of sums alone;
float16 rounds to 2^-11 and bfloat16 to 2^-8 at each of some ten operations of a layer, whose errors mostly cancel. What
was measured is in docs/engines.md; an operator that computes something else is past it at its first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relight.core.errors import FieldError, InvalidInput

TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
"""Largest relative error of any layer, by the dtype that the engine computes in."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Errors by place, in the order in which a token passes them; `outside` is the first one too large, or empty."""

    dtype: str
    tolerance: float
    errors: Mapping[str, float]
    outside: str
    same_token: bool
    """Whether both would say the same next token. For people: two tokens may be closer than rounding."""


def judge(dtype: str, errors: Sequence[tuple[str, float]], same_token: bool) -> Judged:
    """Raises InvalidInput for a dtype without a tolerance, or without a single error."""
    if dtype not in TOLERANCE:
        raise InvalidInput("no tolerance", [FieldError("dtype", " or ".join(TOLERANCE), dtype)])
    if not errors:
        raise InvalidInput("nothing to compare", [FieldError("layers", "at least one", "none")])
    most = TOLERANCE[dtype]
    # Not a number is no small error.
    outside = next((place for place, error in errors if not error <= most), "")
    return Judged(dtype, most, dict(errors), outside, same_token)


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What differs between two engines' tensors, by name: one that only one has, or another digest."""
    found = []
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            found.append(f"{name}: here alone")
        elif name not in ours:
            found.append(f"{name}: there alone")
        elif ours[name] != theirs[name]:
            found.append(f"{name}: {ours[name]} here, {theirs[name]} there")
    return found
