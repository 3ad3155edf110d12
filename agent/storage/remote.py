"""One object of remote storage: GET with ranges, retried where it broke off, and refused when it is not what it was.

No header but these is sent, so that what redirects to elsewhere tells nobody a secret; a redirect to another scheme is
refused. What is said of an address never has its query: a presigned one is a secret.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

import httpx

from relight.core.clock import Clock
from relight.core.errors import LocalFault, RemoteFault

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_INDEX = 64 << 20
MOST_FILES = 4096
READ_SECONDS = 10.0
"""Without a byte for so long, a connection is given up."""
TRIES = 4
"""In a row that bring nothing; one that brought bytes before it broke starts the count anew."""
_PAUSE = 0.5
_REDIRECTS = 5
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
Sink = Callable[[int, bytes], None]
"""Takes bytes, and at which offset of the object they belong."""


class _Passing(Exception):
    """What another try may cure."""


@dataclass(frozen=True, slots=True)
class Object:
    """What an object is, as its first answer said: its size, and a tag that changes with its content (or is empty)."""

    name: str
    bytes: int
    tag: str


@dataclass(slots=True)
class Limits:
    """What every request heeds: `over` is set when nobody wants the bytes any more; `ends_at` is monotonic."""

    clock: Clock
    ends_at: float
    over: threading.Event = field(default_factory=threading.Event)

    def check(self, what: str) -> None:
        """Raises LocalFault when it is over, RemoteFault when it took too long."""
        if self.over.is_set():
            raise LocalFault(f"{what}: nobody wants it any more")
        if self.clock.monotonic() >= self.ends_at:
            raise RemoteFault(f"{what}: storage did not bring it in time")


def shown(uri: str) -> str:
    """An address as it may be told: without user, password and query."""
    url = httpx.URL(uri)
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


class Remote:
    """The objects under one base address; its query, if it has one, goes with every request. Thread-safe."""

    def __init__(self, uri: str, client: httpx.Client, limits: Limits) -> None:
        self._base, self._client, self._limits = httpx.URL(uri), client, limits

    def files(self) -> tuple[str, ...]:
        """Names of the files of weights, from the index where there is one. Raises RemoteFault, LocalFault."""
        try:
            found = bytearray()
            index = self.look(INDEX, MOST_INDEX)
            self.read(index, 0, index.bytes, lambda at, piece: found.extend(piece))
        except FileNotFoundError:
            return (SINGLE,)
        try:
            names = sorted(set(json.loads(found)["weight_map"].values()))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise RemoteFault(f"{INDEX}: expected an object with weight_map, {type(error).__name__}") from None
        wrong = [n for n in names if not isinstance(n, str) or not _NAME.fullmatch(n)]
        if wrong or not 0 < len(names) <= MOST_FILES:
            raise RemoteFault(
                f"{INDEX}: expected 1 to {MOST_FILES} names of .safetensors, got {wrong[:1] or len(names)}"
            )
        return tuple(names)

    def look(self, name: str, most: int) -> Object:
        """What the object is. Raises FileNotFoundError for none, RemoteFault also when it is empty or above `most`."""
        found: list[Object] = []

        def first(answer: httpx.Response) -> None:
            found.append(_described(name, answer))

        self._retried(name, lambda: self._get(name, 0, 1, "", first, lambda at, piece: None))
        size = found[-1].bytes
        if not 0 < size <= most:
            raise RemoteFault(f"{name} has {size} bytes, expected 1 to {most}")
        return found[-1]

    def read(self, thing: Object, start: int, stop: int, sink: Sink) -> None:
        """Hands [start, stop) to `sink`, in order. Raises RemoteFault, LocalFault; what came before stays."""
        at = start

        def same(answer: httpx.Response) -> None:
            now = _described(thing.name, answer)
            if now != thing:
                was, is_ = (f"{o.bytes} bytes {o.tag}" for o in (thing, now))
                raise RemoteFault(f"{thing.name} changed while it was read: {was}, then {is_}")

        def take(offset: int, piece: bytes) -> None:
            nonlocal at
            sink(offset, piece)
            at = offset + len(piece)

        def rest() -> None:
            while at < stop:
                before = at
                try:
                    self._get(thing.name, at, stop, thing.tag, same, take)
                except _Passing:
                    if at == before:
                        raise

        self._retried(thing.name, rest)

    # ------------------------------------------------------------------ one request

    def _retried(self, name: str, work: Callable[[], None]) -> None:
        for n in range(TRIES):
            try:
                work()
                return
            except _Passing as error:
                if n + 1 == TRIES:
                    raise RemoteFault(f"{name}: {error}, {TRIES} times in a row") from None
                self._limits.over.wait(_PAUSE * 2**n)

    def _get(
        self, name: str, start: int, stop: int, tag: str, first: Callable[[httpx.Response], None], sink: Sink
    ) -> None:  # fmt: skip
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if tag.startswith('"'):
            # Only a strong tag may stand here.
            headers["If-Range"] = tag
        at = start
        try:
            with self._answer(name, headers) as answer:
                _refuse(name, answer)
                first(answer)
                for piece in answer.iter_raw():
                    self._limits.check(name)
                    if at + len(piece) > stop:
                        raise RemoteFault(f"{name}: more bytes came than were asked for")
                    sink(at, piece)
                    at += len(piece)
        except httpx.TransportError as error:
            raise _Passing(f"broke off at byte {at}, {type(error).__name__}") from None
        if at < stop:
            raise _Passing(f"ended at byte {at} of {stop}")

    @contextmanager
    def _answer(self, name: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        path = self._base.path.rstrip("/") + "/" + quote(name)
        url = self._base.copy_with(path=path)
        for _ in range(_REDIRECTS):
            self._limits.check(name)
            with self._client.stream("GET", url, headers=headers) as answer:
                if not answer.has_redirect_location:
                    yield answer
                    return
                to = url.join(answer.headers["Location"])
            if to.scheme != self._base.scheme:
                raise RemoteFault(
                    f"{name}: storage redirects from {self._base.scheme} to {to.scheme}, which is refused"
                )
            url = to
        raise RemoteFault(f"{name}: storage redirects more than {_REDIRECTS} times")


def _refuse(name: str, answer: httpx.Response) -> None:
    """Raises for every answer that has not the bytes that were asked for."""
    status = answer.status_code
    if status == 206:
        return
    if status == 200:
        raise RemoteFault(f"{name}: the whole object came instead of a range: it changed, or storage knows no ranges")
    if status in (403, 404) and name == INDEX:
        # Storage that may not be listed says 403 of what is not there.
        raise FileNotFoundError(name)
    if status == 416:
        raise RemoteFault(f"{name}: the range is not there (416): it is shorter than it was, or empty")
    if status in (408, 425, 429) or status >= 500:
        raise _Passing(f"storage answers {status}")
    raise RemoteFault(f"{name}: storage answers {status}")


def _described(name: str, answer: httpx.Response) -> Object:
    said = answer.headers.get("Content-Range", "")
    found = _RANGE.fullmatch(said)
    if found is None:
        raise RemoteFault(f"{name}: expected a Content-Range with the object's size, got {said[:80]!r}")
    return Object(name, int(found[3]), answer.headers.get("ETag") or answer.headers.get("Last-Modified", ""))
