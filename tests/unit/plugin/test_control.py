"""The plugin's control socket and the agent's end of it: results, progress, and errors that keep their type."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.agent.engines.vllm_control import call
from relight.core.errors import Conflict, InvalidInput, LocalFault, ModelDirty, RemoteFault, Unavailable
from relight.plugin.control import ControlServer


def _dirty(arguments: object, progress: object) -> object:
    raise ModelDirty("half", cause=RemoteFault("gone"))


def _raise(kind: type[Exception]):
    def operation(arguments: object, progress: object) -> object:
        raise kind("why")

    return operation


def _steps(arguments, progress) -> object:
    for n in range(int(arguments["n"])):
        progress({"bytes": n})
    return {"done": arguments["n"]}


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    socket_path = tmp_path / "worker-0.sock"
    server = ControlServer(
        socket_path,
        {
            "steps": _steps, "dirty": _dirty, "conflict": _raise(Conflict), "remote": _raise(RemoteFault),
            "input": _raise(InvalidInput), "unavailable": _raise(Unavailable), "defect": _raise(ZeroDivisionError),
        },
    )  # fmt: skip
    yield socket_path
    server.close()
    assert not socket_path.exists()


async def test_a_result_comes_after_its_progress(path: Path) -> None:
    seen: list[object] = []
    assert await call(path, "steps", {"n": 3}, deadline=5, on_progress=seen.append) == {"done": 3}
    assert seen == [{"bytes": 0}, {"bytes": 1}, {"bytes": 2}]


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("conflict", Conflict), ("remote", RemoteFault), ("input", InvalidInput), ("unavailable", Unavailable),
        ("defect", LocalFault), ("unknown", InvalidInput),
    ],
)  # fmt: skip
async def test_an_error_keeps_its_type_over_the_socket(path: Path, operation: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await call(path, operation, deadline=5)
    assert await call(path, "steps", {"n": 0}, deadline=5) == {"done": 0}


async def test_a_dirty_model_keeps_who_was_at_fault(path: Path) -> None:
    with pytest.raises(ModelDirty) as caught:
        await call(path, "dirty", deadline=5)
    assert isinstance(caught.value.cause, RemoteFault)


async def test_nobody_there_is_a_local_fault(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="cannot be asked for 'steps'"):
        await call(tmp_path / "none.sock", "steps", deadline=1)


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"5", b'{"op": 1}', b'{"op": {}}', b"\xff", b'{"op": "steps"'])
def test_a_line_that_is_no_call_is_answered_and_the_server_goes_on(path: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(path))
        sock.sendall(line + b"\n")
        lines = sock.makefile("rb")
        assert json.loads(lines.readline())["error"]["code"] == "invalid-input"
        sock.sendall(b'{"op": "steps", "args": {"n": 0}}\n')
        assert json.loads(lines.readline()) == {"ok": {"done": 0}}
        lines.close()


def test_the_socket_is_for_its_owner_alone(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
