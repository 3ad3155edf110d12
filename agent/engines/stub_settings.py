"""How a stub engine behaves and fails, as values: engine arguments of the form `name=<JSON>`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relight.core.errors import InvalidInput
from relight.core.records import RungKind
from relight.protos.convert import from_dict

FAULTS = ("remote", "local", "dirty", "canary", "hang")


@dataclass(frozen=True, slots=True)
class StubSettings:
    """Seconds and bytes; every default is that of an engine without fault."""

    weight_bytes: int = 8 << 20
    kv_bytes: int = 4 << 20
    start_seconds: float = 0.0
    start_error: str = ""
    """The process writes this and exits with `exit_code` before it listens."""
    never_ready: bool = False
    run_for: float | None = None
    """Seconds after it became ready at which the process exits with `exit_code`."""
    exit_code: int = 1
    hang_after: int | None = None
    """Completions after which none makes progress any more, while /health still answers."""
    stall_seconds: float = 0.5
    """How long running requests may make no progress before the engine counts as hung."""
    token_delay: float = 0.0
    at_once: int = 0
    """So many completions run at once, the others wait; 0 for all."""
    fail_first: int = 0
    """So many completions answer 500 before their first byte."""
    give_up_first: int = 0
    """So many whole completions end half-way, as an engine ends them whose drain takes too long."""
    cut_after: int | None = None
    """Streams break off after so many tokens."""
    wake_errors: Mapping[str, str] = field(default_factory=dict)
    """Rung -> remote | local | dirty | canary | hang."""
    wake_seconds: float = 0.0
    sleep_error: str = ""
    sleep_keeps_bytes: int = 0
    """Bytes of the weights that a sleep does not give back."""
    pieces: int = 1
    """What a lazy start puts off, to be done piece by piece."""
    compiles: str = ""
    """What it compiles, unless it finds that in its compile cache; empty for nothing."""
    refuses_artefacts: bool = False
    """It fails to load what it finds there, says so and compiles again."""
    child: bool = False
    """Start a child in a session of its own that outlives a killed main, as an engine core does."""


def parse(args: Sequence[str]) -> StubSettings:
    """Raises InvalidInput naming the argument and what was expected."""
    values: dict[str, Any] = {}
    for arg in args:
        name, found, text = arg.partition("=")
        try:
            values[name] = json.loads(text)
        except ValueError:
            found = ""
        if not found or name not in StubSettings.__slots__:
            known = ", ".join(StubSettings.__slots__)
            raise InvalidInput(f"engine argument {arg!r}: expected name=<JSON> with a name out of {known}")
    settings = from_dict(values, StubSettings, "list of engine arguments")
    for rung, fault in settings.wake_errors.items():
        if rung not in list(RungKind) or fault not in FAULTS:
            raise InvalidInput(f"engine argument wake_errors: expected a rung with one out of {FAULTS}")
    return settings


def encode(settings: StubSettings) -> str:
    """As one JSON object for the process's command line."""
    return json.dumps(asdict(settings))
