"""Fingerprints: what makes two engines' bytes interchangeable, field by field. No I/O.

`layout`   what makes bytes interchangeable: engine and library versions, parallel layout, dtypes,
           quantisation, kernel packing, device kind;
`content`  which weights: revision, adapters, host scalars;
`runtime`  what the process holds besides: tokenizer, chat template, max_model_len, KV size, compile key.

Copying needs equal layout. A guardian is bound to layout and runtime; waking names the content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


def digest(fields: Mapping[str, str]) -> str:
    """The 32 hexadecimal digits that name these fields: SHA-256 of their canonical JSON, cut to 128 bits."""
    text = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two fingerprints differ; an absent field reads as the empty string."""

    part: str
    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.part}.{self.field}: {self.ours!r} here, {self.theirs!r} there"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Three readable field sets; compare them by `differences`, name them by `digest(fields)`."""

    layout: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)
    runtime: Mapping[str, str] = field(default_factory=dict)

    def differences(self, other: Fingerprint, parts: tuple[str, ...] = ("layout",)) -> list[FieldDifference]:
        """Every differing field of the named parts, in the order of the field names."""
        found = []
        for part in parts:
            ours: Mapping[str, str] = getattr(self, part)
            theirs: Mapping[str, str] = getattr(other, part)
            for name in sorted({*ours, *theirs}):
                a, b = ours.get(name, ""), theirs.get(name, "")
                if a != b:
                    found.append(FieldDifference(part, name, a, b))
        return found
