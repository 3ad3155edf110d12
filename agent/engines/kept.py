"""What the agent itself remembers of an engine that cannot be asked for it: a file in the member's own directory.

Engines whose memory is managed by their own calls do not say what they have released, and some die when it is brought
back twice. So each call that changes it is written down before it is sent and struck out once it was answered: an agent
that finds one unanswered does not know what the engine holds, and nobody else does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from relight.agent.engines.canary import Answer
from relight.core.errors import LocalFault

_FILE = "kept.json"
CONTENTS = 8
"""Revisions of content that are remembered: a guardian changes its content with each rollout."""


@dataclass(frozen=True, slots=True)
class Content:
    """What one revision of content looks like in this engine: digests of its tensors by name, and its canary."""

    digests: Mapping[str, str]
    canary: Answer


@dataclass(frozen=True, slots=True)
class Kept:
    """`released` are the engine's own tags of memory. `level` is that of the last sleep, 0 before the first one."""

    released: tuple[str, ...] = ()
    paused: bool = False
    level: int = 0
    revision: str = ""
    """Of the content that weights, or their host copy, were last of."""
    unanswered: str = ""
    """A call that was sent, whose answer nobody heard."""
    contents: Mapping[str, Content] = field(default_factory=dict)


class KeptFile:
    """One member's. Written before and after each call; a reader after a crash sees one or the other."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self.now = _read(self._path)

    @staticmethod
    def begin(directory: Path) -> None:
        """A new process has released nothing and proven nothing."""
        (directory / _FILE).unlink(missing_ok=True)

    def write(self, **changes: Any) -> None:
        """Replaces fields, and returns when it is on disk."""
        self.now = replace(self.now, **changes)
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(asdict(self.now), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)

    def known(self) -> Kept:
        """What it holds. Raises LocalFault when a call was never answered: nobody knows."""
        if self.now.unanswered:
            why = f"{self.now.unanswered} was never answered"
            raise LocalFault(f"what it holds is not known: {why}; it has to be ended")
        return self.now

    def learned(self, revision: str, content: Content) -> None:
        """What the content of a revision looks like; the oldest of too many are forgotten."""
        contents = {k: v for k, v in self.now.contents.items() if k != revision} | {revision: content}
        self.write(revision=revision, contents=dict(list(contents.items())[-CONTENTS:]))


def _read(path: Path) -> Kept:
    try:
        said = json.loads(path.read_text())
        contents = {
            revision: Content(dict(one["digests"]), Answer.of(one["canary"]))
            for revision, one in said["contents"].items()
        }
        return Kept(**{**said, "released": tuple(said["released"]), "contents": contents})
    except FileNotFoundError:
        return Kept()
    except (OSError, ValueError, TypeError, KeyError) as error:
        return Kept(unanswered=f"{path.name} cannot be read ({error}), so any call")
