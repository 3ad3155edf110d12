"""The agent's own journal: highest epoch, last assignment, and every instance's record.

Entries reach the file before the act that they announce. They are whole, so the newest of a kind wins and
a damaged one costs only itself. A new epoch is forced to disk (it fences across power loss); the rest need
only outlive this process, because a machine that lost power has no engine left to adopt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relight.agent.engines.base import EngineFacts
from relight.agent.linelog import LineLog
from relight.core.errors import InvalidInput
from relight.core.logs import get_logger
from relight.core.records import (
    Assignment,
    Failure,
    InstanceAssignment,
    MemoryReading,
    SourceOffer,
    StartRecord,
)
from relight.core.states import State, Step
from relight.protos.convert import from_dict

_log = get_logger("agent.journal")
KIND, VERSION = "relight-agent", 1
STORY = 16
"""Steps of an instance's story that are kept."""


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """All that an agent must know again after kill -9. (epoch, revision) is what the instance came from."""

    assignment: InstanceAssignment
    epoch: int
    revision: int
    state: State
    since: float
    incarnation: int
    level: int
    pid: int = 0
    start_time: int = 0
    story: tuple[Step, ...] = ()
    failure: Failure | None = None
    memory: MemoryReading | None = None
    start: StartRecord | None = None
    source: SourceOffer | None = None
    relay: SourceOffer | None = None
    facts: EngineFacts | None = None


class Journal:
    """Opened once per agent. Raises InvalidInput for a newer version."""

    def __init__(self, path: Path) -> None:
        self._log = LineLog(path, KIND, VERSION)
        self.epoch = 0
        self.assignment: Assignment | None = None
        self.instances: dict[str, InstanceRecord] = {}
        self.boot_id = ""
        self.damage = list(self._log.damage)
        for entry in self._log.entries:
            try:
                self._replay(entry)
            except InvalidInput as error:
                self.damage.append(str(error))
        for damage in self.damage:
            _log.warning("journal.damaged", at=damage)

    def _replay(self, entry: dict[str, Any]) -> None:
        if "epoch" in entry:
            self.epoch = max(self.epoch, int(entry["epoch"]))
        elif "boot" in entry:
            self.boot_id = str(entry["boot"])
        elif "assignment" in entry:
            self.assignment = from_dict(entry["assignment"], Assignment, "journal entry `assignment`")
        elif "instance" in entry:
            record = from_dict(entry["instance"], InstanceRecord, "journal entry `instance`")
            self.instances[record.assignment.instance] = record
        elif "forget" in entry:
            self.instances.pop(entry["forget"], None)

    def begin(self, boot_id: str) -> None:
        """Compacts the file to what is current, under this boot."""
        self.boot_id = boot_id
        entries: list[dict[str, Any]] = [{"boot": boot_id}, {"epoch": self.epoch}]
        if self.assignment is not None:
            entries.append({"assignment": self.assignment})
        entries += [{"instance": record} for record in self.instances.values()]
        self._log.rewrite(entries)

    def accept(self, assignment: Assignment) -> None:
        """The intent, before anything is done about it."""
        if assignment.epoch > self.epoch:
            self.epoch = assignment.epoch
            self._log.append({"epoch": assignment.epoch}, sync=True)
        self.assignment = assignment
        self._log.append({"assignment": assignment})

    def keep(self, record: InstanceRecord) -> None:
        """An instance as it is about to be."""
        self.instances[record.assignment.instance] = record
        self._log.append({"instance": record})

    def forget(self, instance: str) -> None:
        """The instance is gone and the controller knows it."""
        if self.instances.pop(instance, None) is not None:
            self._log.append({"forget": instance})

    def close(self) -> None:
        """Closes the file."""
        self._log.close()
