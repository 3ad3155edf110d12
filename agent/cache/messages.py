"""What a cache node and those who ask it say to each other, over TCP or TLS.

    client  frame{version, grant}                         the node's own grant (transfer/grants.py), as for weights
    server  status 0
    client  frame{op, ...}
      find      {key}                      reply {holding | null, quarantine | null}
      nearest   {fields}                   reply {fields | null}: the held key with the fewest differences
      sealed    {bundle, use}              reply {signer, signature}, frame{manifest}
      read      {bundle, offset, length}   reply {}, then `length` bytes
      put       {signer, signature, last_use | null}, frame{manifest}
                                           reply {wanted}; if so the body follows, then reply {}
      acquire   {key, holder, token, seconds}   reply {holder, mine, seconds}
      unlease   {key, token}               reply {released}
      wait      {key, seconds}             reply {}: there is a bundle, a quarantine, no lease, or the time is over
      quarantine{key, bundle, reason}      reply {}
      release   {key}                      reply {released}
      doubt     {bundle}                   reply {good}: proven anew, and given up if bad
      list      {}                         reply {revision, holdings, quarantines, models: by key}
    server  status 1 and frame{code, error, retry_after} instead of a reply; the connection goes on after a request that
            was understood, and ends otherwise

Framing, listening, TLS and grants are those of weights (transfer/transports/wire.py, docs/adr/0006). A `key` is a
digest, 32 hexadecimal digits; a `bundle` is a name, 64. All JSON is bounded before it is read, and checked before it
is used.
"""

from __future__ import annotations

import json
import re
import socket
from typing import Any

from relight.agent.cache.bundle import is_name
from relight.agent.cache.placement import Holding
from relight.agent.cache.store import Quarantine
from relight.core.errors import (
    Conflict,
    Denied,
    FieldError,
    InvalidInput,
    NotFound,
    RelightError,
    RemoteFault,
    Unavailable,
)
from relight.transfer.transports import wire

VERSION = 1
MAX_REQUEST = 1 << 20
MAX_REPLY = 64 << 20
MAX_READ = 64 << 20
MAX_WAIT = 30.0
"""Seconds that one `wait` blocks at most; whoever still wants to wait asks again."""
_KEY = re.compile("[0-9a-f]{32}")
_ERRORS: dict[str, type[RelightError]] = {e.code: e for e in (Conflict, Denied, InvalidInput, NotFound)}


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    """One message as a frame."""
    wire.send_frame(sock, json.dumps(message, separators=(",", ":")).encode())


def receive(sock: socket.socket, most: int) -> dict[str, Any]:
    """One message. Raises InvalidInput when it is too long or no JSON object; OSError, wire.Closed."""
    try:
        said = json.loads(wire.receive_frame(sock, most))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise InvalidInput("expected a JSON object")
    return said


def accept(sock: socket.socket, message: dict[str, Any]) -> None:
    """A reply."""
    sock.sendall(wire.OK)
    send(sock, message)


def refuse(sock: socket.socket, error: Exception) -> None:
    """An error in the place of a reply; what is no error of ours is not described to a peer."""
    known = isinstance(error, RelightError)
    sock.sendall(wire.REFUSED)
    send(
        sock,
        {
            "code": error.code if isinstance(error, RelightError) else "internal",
            "error": str(error)[:2000] if known else type(error).__name__,
            "retry_after": getattr(error, "retry_after", 0.0),
        },
    )


def reply(sock: socket.socket, node: str) -> dict[str, Any]:
    """The answer to a request. Raises what the node refused with, or RemoteFault when it does not answer as a node."""
    try:
        status = wire.receive(sock, 1)
        said = receive(sock, MAX_REPLY)
    except TimeoutError as error:
        raise RemoteFault(f"cache node {node}: no answer within {sock.gettimeout()} s") from error
    except (OSError, wire.Closed, InvalidInput) as error:
        raise RemoteFault(f"cache node {node}: connection lost ({error or 'closed'})") from error
    if status == wire.OK:
        return said
    reason = f"cache node {node}: {said.get('error', 'no reason given')}"
    code, after = said.get("code"), said.get("retry_after")
    if code == Unavailable.code:
        raise Unavailable(reason, retry_after=float(after) if isinstance(after, int | float) else 1.0)
    raise _ERRORS.get(str(code), RemoteFault)(reason)


class Fields:
    """The fields of one message, each checked as it is taken. Raises InvalidInput naming the wrong one."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def _wrong(self, name: str, expected: str) -> InvalidInput:
        return InvalidInput("bad message", [FieldError(name, expected, repr(self._said.get(name))[:80])])

    def text(self, name: str, most: int = 256) -> str:
        value = self._said.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self._wrong(name, f"a text of at most {most}")
        return value

    def key(self, name: str = "key") -> str:
        value = self.text(name)
        if not _KEY.fullmatch(value):
            raise self._wrong(name, "32 hexadecimal digits")
        return value

    def bundle(self, name: str = "bundle") -> str:
        value = self.text(name)
        if not is_name(value):
            raise self._wrong(name, "64 hexadecimal digits")
        return value

    def data(self, name: str) -> bytes:
        try:
            return bytes.fromhex(self.text(name))
        except ValueError:
            raise self._wrong(name, "hexadecimal digits") from None

    def number(self, name: str, least: float, most: float) -> float:
        value = self._said.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._wrong(name, f"a number from {least:g} to {most:g}")
        return value

    def natural(self, name: str, most: int) -> int:
        value = self._said.get(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self._wrong(name, f"an integer from 0 to {most}")
        return value

    def flag(self, name: str) -> bool:
        value = self._said.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def several(self, name: str) -> list[Fields]:
        value = self._said.get(name)
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise self._wrong(name, "a list of objects")
        return [Fields(v) for v in value]

    def inner(self, name: str) -> Fields | None:
        value = self._said.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object or null")
        return None if value is None else Fields(value)

    def texts(self, name: str) -> dict[str, str]:
        value = self._said.get(name)
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._wrong(name, "an object of texts")
        return value

    def raw(self, name: str) -> object:
        """Whatever is there: for what has a check of its own."""
        return self._said.get(name)


def plain(record: Holding | Quarantine) -> dict[str, object]:
    """A record as an object."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def holding(said: Fields) -> Holding:
    """The other way round."""
    return Holding(
        said.key(), said.bundle(), said.natural("bytes", 1 << 50), said.number("last_use", 0, 1e12)
    )  # fmt: skip


def quarantine(said: Fields) -> Quarantine:
    """The other way round. A quarantine may name no bundle."""
    name = said.text("bundle")
    return Quarantine(
        said.key(), said.bundle() if name else "", said.text("reason", 4096), said.number("since", 0, 1e12)
    )
