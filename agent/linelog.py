"""An append-only file of JSON lines with a checksum each: what both journals are made of.

Standard library only. A torn last line and corrupt lines are skipped and named; a file of another kind or
a newer version is refused.
Written lines outlive the death of the process at once; `sync=True` makes them outlive the machine's as well.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from relight.core.errors import FieldError, InvalidInput


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":"), default=_fields)
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _fields(record: Any) -> dict[str, Any]:
    # Not `asdict`: it copies the whole tree first, and this is on the way of every wake.
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _parse(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    try:
        if checksum != b"%08x" % zlib.crc32(text):
            return None
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


class LineLog:
    """One journal file, open for appending. Its first line names its kind and version."""

    def __init__(self, path: Path, kind: str, version: int) -> None:
        """Opens or creates the file. Raises InvalidInput for another kind or a newer version.

        `entries` are the readable ones, in order; `damage` has one line for each that was skipped.
        """
        self._path, self._kind, self._version = path, kind, version
        self.entries: list[dict[str, Any]] = []
        self.damage: list[str] = []
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        if data:
            self._load(data)
        self._fd = -1
        self.rewrite(self.entries)

    def _load(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        header = _parse(whole[0]) if whole else None
        if header is None:
            self.damage.append("line 1: the header is damaged")
        elif header.get("journal") != self._kind:
            raise InvalidInput(
                f"{self._path} is not a journal of this kind",
                [FieldError("journal", self._kind, repr(header.get("journal")))],
            )
        elif not isinstance(header.get("version"), int) or header["version"] > self._version:
            raise InvalidInput(
                f"{self._path} was written by a newer release",
                [FieldError("version", f"at most {self._version}", repr(header.get("version")))],
            )
        for number, line in enumerate(whole[1:], 2):
            entry = _parse(line)
            if entry is None:
                self.damage.append(f"line {number}: checksum or JSON is wrong")
            else:
                self.entries.append(entry)
        if rest:
            self.damage.append(f"line {len(whole) + 1}: torn, the end is missing")

    def append(self, entry: dict[str, Any], *, sync: bool = False) -> None:
        """Adds one entry; values may be dataclasses. Raises OSError when the disk refuses it."""
        os.write(self._fd, _line(entry))
        if sync:
            os.fdatasync(self._fd)

    def rewrite(self, entries: list[dict[str, Any]]) -> None:
        """Replaces the file's content atomically by `entries`."""
        temporary = self._path.with_suffix(".new")
        header = {"journal": self._kind, "version": self._version}
        with temporary.open("wb") as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(b"".join(map(_line, [header, *entries])))
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(self._path)
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the file; further appends fail."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
