"""Keys of compile artefacts: everything that changes them, readable, named by a digest. No I/O.

A key is a set of named texts, `version.torch`, `argument.--max-model-len`, `environment.VLLM_PLUGINS`, `model` (the
path as written: vLLM hashes the string), `source.vllm` (where it lies: artefacts remember absolute paths), and so on.
A field that is absent differs from one that is empty, because engines tell the two apart as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from relight.agent.cache import rules
from relight.core.errors import FieldError, InvalidInput
from relight.core.fingerprint import digest

MAX_FIELDS = 1000
MAX_NAME = 200
MAX_VALUE = 64 << 10


@dataclass(frozen=True, slots=True)
class Difference:
    """One component in which two keys differ; None where a key lacks it."""

    field: str
    ours: str | None
    theirs: str | None

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.ours)} here, {_shown(self.theirs)} there"


def _shown(value: str | None) -> str:
    return "absent" if value is None else repr(value if len(value) <= 80 else value[:77] + "...")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The readable fields, and the 32 hexadecimal digits that name them."""

    fields: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical fields, cut to 128 bits. A name to find by: equality is that of the fields."""
        return digest(self.fields)

    @property
    def engine(self) -> str:
        """Which engine's directories the artefacts lie in."""
        return self.fields.get("engine", "")

    def differences(self, other: CacheKey) -> list[Difference]:
        """Every differing component, by name."""
        return [
            Difference(name, self.fields.get(name), other.fields.get(name))
            for name in sorted({*self.fields, *other.fields})
            if self.fields.get(name) != other.fields.get(name)
        ]


@dataclass(frozen=True, slots=True)
class EngineStart:
    """One start of an engine as far as compilation sees it.

    `versions` by distribution; `sources` where modules lie (absolute); `code` digests of sources that no version names;
    `device` kind, name, instruction set, driver; `model_files` digests by name; `ranks` those that this node holds, as
    "0" or "0-7": each rank's artefacts are its own.
    """

    engine: str
    model: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    device: Mapping[str, str] = field(default_factory=dict)
    model_files: Mapping[str, str] = field(default_factory=dict)
    ranks: str = "0"


def describe(start: EngineStart) -> CacheKey:
    """The key of a start. What is private to a pod (names, addresses, places, secrets) does not enter."""
    fields = {"engine": start.engine, "model": start.model, "ranks": start.ranks}
    parts = {
        "version": start.versions, "source": start.sources, "code": start.code, "device": start.device,
        "model-file": start.model_files,
        "environment": {k: v for k, v in start.environment.items() if rules.counts(k)},
        "argument": _arguments(start.engine, start.arguments),
    }  # fmt: skip
    for part, named in parts.items():
        fields |= {f"{part}.{name}": value for name, value in named.items()}
    return checked(fields)


def _arguments(engine: str, words: Sequence[str]) -> dict[str, str]:
    """Option -> its values, however they were written: `--a=b`, `--a b`, `--a_b`, JSON with or without spaces."""
    left_out = rules.ARGUMENTS_LEFT_OUT.get(engine, frozenset[str]())
    found: dict[str, list[str]] = {}
    for name, values in _options(words):
        if name not in left_out:
            found.setdefault(name, []).append(" ".join(map(_canonical, values)))
    return {name: given[0] if len(given) == 1 else json.dumps(given) for name, given in found.items()}


def _options(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if word.startswith("-") and not _number(word):
            if name or values:
                yield name, values
            head, equals, value = word.partition("=")
            name = rules.ALIASES.get(head, head)
            if name.startswith("--"):
                option, dot, rest = name.partition(".")
                name = option.replace("_", "-") + dot + rest
            values = [value] if equals else []
        else:
            values.append(word)
    if name or values:
        yield name, values


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _canonical(value: str) -> str:
    if value[:1] in ("{", "["):
        try:
            return json.dumps(json.loads(value), sort_keys=True, separators=(",", ":"))
        except ValueError:
            return value
    return value


def checked(raw: object) -> CacheKey:
    """The key whose fields are `raw`, which may come from a peer. Raises InvalidInput naming what does not fit."""
    if not isinstance(raw, Mapping) or not 0 < len(raw) <= MAX_FIELDS:
        raise InvalidInput(
            "not a key", [FieldError("key", f"an object of 1 to {MAX_FIELDS} texts", type(raw).__name__)]
        )
    for name, value in raw.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise InvalidInput("not a key", [FieldError("key", f"names of at most {MAX_NAME}", repr(name)[:80])])
        if not isinstance(value, str) or len(value) > MAX_VALUE:
            raise InvalidInput(
                "not a key", [FieldError(f"key.{name}", f"a text of at most {MAX_VALUE}", type(value).__name__)]
            )
    return CacheKey(dict(raw))


def nearest(key: CacheKey, known: Iterable[CacheKey]) -> tuple[CacheKey, list[Difference]] | None:
    """The known key with the fewest differences, and these: what a miss is explained by."""
    best: tuple[CacheKey, list[Difference]] | None = None
    for other in known:
        if other.engine != key.engine:
            continue
        found = key.differences(other)
        if best is None or len(found) < len(best[1]):
            best = other, found
    return best
