"""What agent and supervisor say to each other: JSON lines over a unix socket. Standard library only.

    hello     {"hello": "relight-supervisor", "version": 1}           first line of both sides
    request   {"id": 1, "op": "spawn" | "adopt" | "list" | "environment" | "signal" | "end" |
                                       "shutdown", ...}
    reply     {"id": 1, "ok": true, ...} or {"id": 1, "ok": false, "code": ..., "error": ...}
    event     {"event": "exit", "instance", "pid", "start_time", "code", "killed": [pid, ...]}

`code` of an exit: the exit status, minus the signal's number, or null when the process was adopted.
"""

from __future__ import annotations

import json
from typing import Any

from relight.core.errors import FieldError, InvalidInput

NAME = "relight-supervisor"
VERSION = 1
MAX_LINE = 1 << 20

_SPAWN = {"instance": str, "argv": list, "env": dict, "cwd": str, "log": str}
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "spawn": {**_SPAWN},
    "adopt": {"instance": str, "pid": int},
    "list": {},
    "environment": {},
    "signal": {"instance": str, "signal": int},
    "end": {"instance": str, "grace_seconds": (int, float)},
    "shutdown": {"grace_seconds": (int, float)},
}


def hello() -> dict[str, Any]:
    """The first line of either side."""
    return {"hello": NAME, "version": VERSION}


def check_hello(message: dict[str, Any]) -> None:
    """Raises InvalidInput unless the other side speaks this protocol and version."""
    if message.get("hello") != NAME:
        raise InvalidInput("not a supervisor's peer", [FieldError("hello", NAME, repr(message.get("hello")))])
    if message.get("version") != VERSION:
        raise InvalidInput(
            "another protocol version", [FieldError("version", str(VERSION), repr(message.get("version")))]
        )


def encode(message: dict[str, Any]) -> bytes:
    """One message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """One line as a message. Raises InvalidInput when it is not a JSON object."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise InvalidInput("bad line", [FieldError("line", "a JSON object", repr(line[:40]))])
    return message


def check_request(message: dict[str, Any]) -> str:
    """The operation's name. Raises InvalidInput naming every absent, unknown or mistyped field."""
    operation = message.get("op")
    if not isinstance(operation, str) or operation not in _FIELDS:
        raise InvalidInput("unknown request", [FieldError("op", " or ".join(_FIELDS), repr(operation)[:80])])
    fields = _FIELDS[operation]
    errors = [
        FieldError(name, _named(kind), repr(message.get(name))[:80])
        for name, kind in fields.items()
        if not isinstance(message.get(name), kind) or isinstance(message.get(name), bool)
    ]
    errors += [
        FieldError(name, "no such field", repr(message[name])[:80])
        for name in message
        if name not in fields and name not in ("id", "op")
    ]
    if not errors and operation == "spawn":
        if not message["argv"] or not all(isinstance(a, str) and "\0" not in a for a in message["argv"]):
            errors.append(FieldError("argv", "at least one string, without NUL", repr(message["argv"])[:80]))
        if not all(isinstance(v, str) and "\0" not in k + v for k, v in message["env"].items()):
            errors.append(FieldError("env", "strings, without NUL", "other values"))
    grace = message.get("grace_seconds", 0)
    if not errors and not 0 <= grace <= 3600:
        errors.append(FieldError("grace_seconds", "0 to 3600", repr(grace)))
    if errors:
        raise InvalidInput(f"bad {operation} request", errors)
    return operation


def _named(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__
