"""The agent's end of the plugin's control socket (plugin/control.py): calls, progress, typed errors back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relight.core.errors import (
    Conflict,
    InvalidInput,
    LocalFault,
    ModelDirty,
    RelightError,
    RemoteFault,
    Unavailable,
)

MAX_LINE = 8 << 20
_TYPES: dict[str, type[RelightError]] = {
    kind.code: kind for kind in (Conflict, InvalidInput, LocalFault, RemoteFault, Unavailable)
}


def _raised(error: dict[str, Any]) -> RelightError:
    code, message = str(error.get("code")), str(error.get("message"))
    if code == ModelDirty.code:
        cause = RemoteFault if error.get("cause") == RemoteFault.code else LocalFault
        return ModelDirty(message, cause=cause(message))
    if code == InvalidInput.code:
        return InvalidInput(message)
    return _TYPES.get(code, LocalFault)(message)


async def call(
    path: Path,
    operation: str,
    arguments: dict[str, object] | None = None,
    *,
    deadline: float,
    on_progress: Callable[[Any], None] = lambda said: None,
) -> Any:
    """Calls one operation of the plugin and returns its result.

    Raises the error that the plugin raised, by type; LocalFault when it cannot be reached, ends the
    connection, or takes longer than `deadline` seconds.
    """
    try:
        async with asyncio.timeout(deadline):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE)
            try:
                writer.write(json.dumps({"op": operation, "args": arguments or {}}).encode() + b"\n")
                async for line in reader:
                    answer = json.loads(line)
                    if "progress" in answer:
                        on_progress(answer["progress"])
                    elif "error" in answer:
                        raise _raised(answer["error"])
                    else:
                        return answer["ok"]
            finally:
                writer.close()
    except TimeoutError as error:
        raise LocalFault(f"the engine did not finish {operation!r} within {deadline:g} s") from error
    except (OSError, ValueError) as error:
        raise LocalFault(f"the engine cannot be asked for {operation!r}: {error}") from error
    raise LocalFault(f"the engine ended the connection during {operation!r}")
