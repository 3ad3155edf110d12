"""An engine's command line as names and values, and which of its flags a version of the engine takes. No I/O but data.

The lists in flags/ are written by scripts/engine_flags.py out of the engine's own parser.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

ALIASES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-q": "--quantization", "-cc": "--compilation-config", "-ep": "--enable-expert-parallel",
    "--tp": "--tensor-parallel-size", "--tp-size": "--tensor-parallel-size",
}  # fmt: skip

FACTORS: Mapping[str, int] = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
}  # fmt: skip
"""Small letters count in tens, capitals in twos."""


class Arguments:
    """Read-only. Of a flag that stands twice the last one counts, as engines have it."""

    def __init__(self, args: Sequence[str]) -> None:
        """`args` as the engine gets them: one text each, nothing quoted."""
        self._values = dict(_pairs(args))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        """The value; empty of a flag without one, None where the flag is not given."""
        return self._values.get(name)

    def number(self, name: str) -> float | None:
        """The value as a number, with the suffixes that vLLM takes; None where it is none."""
        value = (self._values.get(name) or "").strip()
        factor = FACTORS.get(value[-1:], 1)
        try:
            found = float(value[:-1] if factor > 1 else value) * factor
        except ValueError:
            return None
        return found if math.isfinite(found) else None

    def on(self, name: str) -> bool | None:
        """Whether `--name` is switched on or, as `--no-name`, off; None where neither is said."""
        if f"--no-{name}" in self._values:
            return False
        if f"--{name}" in self._values:
            return (self._values[f"--{name}"] or "true").lower() not in ("false", "0")
        return None

    def config(self, name: str) -> Mapping[str, Any]:
        """A flag's JSON, with what was given as `--name.field value`; empty where it is none."""
        found: dict[str, Any] = {}
        try:
            told = json.loads(self._values.get(name) or "{}")
        except (ValueError, RecursionError):
            told = {}
        if isinstance(told, dict):
            found |= told
        prefix = f"{name}."
        return found | {key[len(prefix) :]: value for key, value in self._values.items() if key.startswith(prefix)}

    @property
    def flags(self) -> tuple[str, ...]:
        """The names that stand there, without the fields of their JSON."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self._values))


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if not _is_flag(word):
            continue
        name, found, value = word.partition("=")
        name, dot, field = name.partition(".")
        name = ALIASES.get(name, name.replace("_", "-")) + dot + field
        values = [value] if found else []
        while not found and position < len(args) and not _is_flag(args[position]):
            values.append(args[position])
            position += 1
        yield name, " ".join(values)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) > 1 and word[0] == "-" and word[1].isalpha())


@cache
def _lists() -> Mapping[str, frozenset[str]]:
    folder = files(__package__) / "flags"
    return {f.name.removesuffix(".txt"): frozenset(f.read_text().split()) for f in folder.iterdir()}


def known_flags(engine: str, version: str) -> frozenset[str]:
    """All flags of a version; empty where it is not known here. What follows a `+` is how it was built."""
    return _lists().get(f"{engine}-{version.partition('+')[0]}", frozenset())


def unknown_flags(arguments: Arguments, engine: str, version: str) -> tuple[str, ...]:
    """Those that this version would refuse; none where the version is not known. A beginning of one flag alone is that
    flag, and -O3 has no space in it, as the engine's parser has it."""
    known = known_flags(engine, version)
    if not known:
        return ()
    return tuple(
        flag
        for flag in arguments.flags
        if flag not in known
        and not flag.startswith("-O")
        and not (flag.startswith("--") and len([k for k in known if k.startswith(flag)]) == 1)
    )
