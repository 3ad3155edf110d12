"""Where a machine's state lies, and what is in it: tokens, certificates, component files, running processes."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from relight.core.errors import FieldError, InvalidInput, NotFound

VARIABLE = "RELIGHT_STATE"
COMPONENTS = ("controller", "gateway", "agent")


def state_directory(given: Path | None) -> Path:
    """--state, else $RELIGHT_STATE, else ~/.local/state/relight."""
    if given is not None:
        return given.expanduser().resolve()
    return Path(os.environ.get(VARIABLE) or Path.home() / ".local" / "state" / "relight").expanduser().resolve()


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process began; tells a process from a later one of the same pid."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Process:
    """A component that `up` started."""

    name: str
    pid: int
    start_time: int

    def alive(self) -> bool:
        """Whether it is still this very process."""
        return start_time(self.pid) == self.start_time

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it is gone."""
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`. It need not be a child of this process."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive():
                return True
            import select

            return bool(select.select([descriptor], [], [], seconds)[0])
        finally:
            os.close(descriptor)


class Home:
    """One machine's state directory; private to its owner."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "run"
        self.connection = path / "connection.json"

    def create(self) -> None:
        """Makes the directory. Raises InvalidInput when it is not ours alone."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self.run.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                "the state directory cannot be used",
                [FieldError("--state", "a directory that can be written", f"{self.path} ({error.strerror})")],
            ) from error

    def write(self, name: str, content: object) -> Path:
        """Writes a JSON file that only the owner can read; it may hold tokens."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=2)
        return path

    def record(self, process: Process) -> None:
        """Remembers a started component."""
        self.write(f"run/{process.name}.json", asdict(process))

    def processes(self) -> list[Process]:
        """The components that were started and are not known to have ended."""
        found = []
        for path in sorted(self.run.glob("*.json")):
            try:
                found.append(Process(**json.loads(path.read_text())))
            except (ValueError, TypeError, OSError):
                path.unlink(missing_ok=True)
        return found

    def forget(self, process: Process) -> None:
        """Drops the record of an ended component."""
        (self.run / f"{process.name}.json").unlink(missing_ok=True)

    def running(self) -> list[Process]:
        """The components that run now."""
        return [p for p in self.processes() if p.alive()]

    def connect(self) -> tuple[str, str]:
        """(controller URL, operator token). Raises NotFound when nothing was brought up here."""
        try:
            said = json.loads(self.connection.read_text())
            return str(said["url"]), str(said["token"])
        except (OSError, ValueError, KeyError) as error:
            raise NotFound(
                f"nothing is up in {self.path}: run `relight up -f FILE`, or say where the controller is with "
                "--server and RELIGHT_TOKEN"
            ) from error
