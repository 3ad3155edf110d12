"""Which of Relight's own options an argument of a model would set, however it is spelled. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

LEAST = 4
"""Letters, dashes included, from which a beginning is taken for the option that it begins: argparse takes it so."""


def own(argument: str, names: Iterable[str]) -> str | None:
    """The option out of `names` that `argument` sets, written out, abbreviated, or with `_` for `-`; None for none."""
    word = argument.partition("=")[0]
    if word.startswith("--"):
        word = "--" + word[2:].replace("_", "-")
    listed = tuple(names)
    if word in listed:
        return word
    if not word.startswith("--") or len(word) < LEAST:
        return None
    return next((name for name in listed if name.startswith(word)), None)
