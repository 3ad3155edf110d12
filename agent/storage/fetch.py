"""A whole checkpoint out of remote storage into memory: every file complete, checked, and then immutable."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import httpx

from relight.agent.storage.remote import READ_SECONDS, Limits, Object, Remote
from relight.core.errors import LocalFault, RemoteFault

STREAMS = 4
"""Connections that a checkpoint is read by."""
PART = 32 << 20
"""Bytes that one of them asks for at a time."""
_MOST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One file in memory: nobody can change it any more."""

    name: str
    descriptor: int
    bytes: int


def fetch(
    uri: str, sha256: Mapping[str, str], most: int, limits: Limits, say: Callable[[int, int], None]
) -> tuple[File, ...]:
    """All files of the checkpoint under `uri`, which take at most `most` bytes. Blocking.

    `say` hears bytes that came and bytes there are. Raises RemoteFault when storage does not give what it promised,
    LocalFault when there is no room; nothing is kept then.
    """
    made: list[File] = []
    try:
        with httpx.Client(timeout=READ_SECONDS, follow_redirects=False, trust_env=False) as client:
            remote = Remote(uri, client, limits)
            objects = [remote.look(name, 1 << 50) for name in remote.files()]
            total = sum(o.bytes for o in objects)
            if total > most:
                raise LocalFault(f"the checkpoint has {total} bytes, and {most} are left of the budget")
            made += [File(o.name, _memory(o), o.bytes) for o in objects]
            _read(remote, objects, made, limits, say)
        for file in made:
            _check(file, sha256.get(file.name, ""))
            fcntl.fcntl(
                file.descriptor, fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
            )  # fmt: skip
    except BaseException:
        release(made)
        raise
    return tuple(made)


def release(files: list[File] | tuple[File, ...]) -> None:
    """Gives the memory back, as far as no engine is reading it."""
    for file in files:
        os.close(file.descriptor)


def _memory(thing: Object) -> int:
    try:
        descriptor = os.memfd_create(f"relight-{thing.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, thing.bytes)
    except OSError as error:
        raise LocalFault(f"{thing.name}: {thing.bytes} bytes of memory: {error.strerror}") from error
    return descriptor


def _read(
    remote: Remote, objects: list[Object], files: list[File], limits: Limits, say: Callable[[int, int], None]
) -> None:
    total, done, lock = sum(o.bytes for o in objects), 0, threading.Lock()

    def part(thing: Object, file: File, start: int) -> None:
        def sink(at: int, piece: bytes) -> None:
            nonlocal done
            os.pwrite(file.descriptor, piece, at)
            with lock:
                done += len(piece)
                say(done, total)

        remote.read(thing, start, min(start + PART, thing.bytes), sink)

    with ThreadPoolExecutor(STREAMS, "relight-storage") as pool:
        parts = [
            pool.submit(part, thing, file, start)
            for thing, file in zip(objects, files, strict=True)
            for start in range(0, thing.bytes, PART)
        ]
        ended, rest = wait(parts, return_when=FIRST_EXCEPTION)
        if rest:
            # They are of no use any more, and must not write into descriptors that are closed.
            limits.over.set()
            pool.shutdown(cancel_futures=True)
    for each in parts:
        if each in ended:
            each.result()


def _check(file: File, sha256: str) -> None:
    """Raises RemoteFault unless the file is whole, as its own header says, and has the digest that it shall have."""
    head = os.pread(file.descriptor, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(_MOST_HEADER, file.bytes - 8):
        raise RemoteFault(f"{file.name}: not a file of safetensors")
    try:
        header = json.loads(os.pread(file.descriptor, length, 8))
        header.pop("__metadata__", None)
        end = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError):
        raise RemoteFault(f"{file.name}: not a file of safetensors") from None
    if 8 + length + end != file.bytes:
        raise RemoteFault(f"{file.name} has {file.bytes} bytes, and its own header says {8 + length + end}")
    if sha256:
        with os.fdopen(os.dup(file.descriptor), "rb") as opened:
            opened.seek(0)
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != sha256:
            raise RemoteFault(f"{file.name}: its sha256 is {found}, expected {sha256}")
