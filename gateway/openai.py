"""OpenAI's shapes: errors, the list of models, and the model's name in requests and answers. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NoReturn

from relight.core.errors import FieldError, InvalidInput
from relight.gateway.table import Names

COMPLETIONS = frozenset({"/v1/completions", "/v1/chat/completions"})


def error_body(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def models_body(names: Names, owner_at: int = 0) -> dict[str, Any]:
    """The list of models, by every name that reaches exactly one."""
    data = [
        {"id": name, "object": "model", "created": owner_at, "owned_by": model.namespace}
        for name, model in names.public()
    ]
    return {"object": "list", "data": data}


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed completion request. `raw` is the body as it came."""

    model: str
    stream: bool
    body: dict[str, Any]
    raw: bytes

    def for_engine(self, served_name: str) -> bytes:
        """The body with the name by which the engine knows the model; untouched when it is the same."""
        if served_name == self.model:
            return self.raw
        return json.dumps({**self.body, "model": served_name}, ensure_ascii=False).encode()


def parse(raw: bytes) -> Asked:
    """Raises InvalidInput naming the field and what was expected there."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidInput("bad body", [FieldError("body", "JSON of sane depth", "too many levels")]) from None
    except ValueError as error:
        raise InvalidInput("bad body", [FieldError("body", "JSON", str(error)[:120])]) from None
    if not isinstance(body, dict):
        raise InvalidInput("bad body", [FieldError("body", "a JSON object", type(body).__name__)])
    model, stream = body.get("model"), body.get("stream")
    if not isinstance(model, str) or not model:
        raise InvalidInput("bad body", [FieldError("model", "the name of a model", repr(model)[:80])])
    if not (stream is None or isinstance(stream, bool)):
        raise InvalidInput("bad body", [FieldError("stream", "true or false", repr(stream)[:80])])
    return Asked(model, bool(stream), body, raw)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def aborted(data: bytes) -> bool:
    """Whether the engine gave this whole answer up before its end, as it does when its drain takes too long."""
    if b'"abort"' not in data:
        return False
    try:
        choices = json.loads(data)["choices"]
        return any(choice["finish_reason"] == "abort" for choice in choices)
    except (ValueError, KeyError, TypeError):
        return False


class Renamer:
    """Puts the client's name for the model back into answers, event by event.

    Inside JSON strings quotes are escaped, so the pattern cannot match generated text.
    """

    def __init__(self, served_name: str, asked: str) -> None:
        self.idle = served_name == asked
        served = re.escape(json.dumps(served_name)).encode()
        ascii_too = re.escape(json.dumps(served_name, ensure_ascii=False)).encode()
        self._pattern = re.compile(rb'("model"\s*:\s*)(?:' + served + rb"|" + ascii_too + rb")")
        self._to = json.dumps(asked).encode()

    def whole(self, data: bytes) -> bytes:
        """A whole JSON answer."""
        return self._pattern.sub(lambda m: m[1] + self._to, data, count=1)

    async def lines(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A stream of events: lines are kept together, everything else passes as it comes."""
        rest = b""
        async for piece in pieces:
            data = rest + piece
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if end:
                yield b"".join(self.whole(line) for line in data[:end].splitlines(keepends=True))
        if rest:
            yield self.whole(rest)
