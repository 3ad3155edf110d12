"""Forking an engine, and what the child does to become it: its own environment, files and command line."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relight.core import failpoints
from relight.plugin.zygote import place

GO_SECONDS = 30.0
"""How long a child waits for somebody to answer for it."""
MAX_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Ask:
    """One engine: `argv` is a whole command line, `python -m MODULE ...`; `env` is complete."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    log: str

    @property
    def module(self) -> str:
        """The module that is run."""
        return self.argv[2]


class Preload(Protocol):
    """An engine's part of a zygote; see server.Zygote."""

    def preload(self) -> None: ...

    def in_child(self, env: Mapping[str, str]) -> None: ...

    def model_of(self, argv: Sequence[str]) -> str: ...

    def prepare(self, argv: Sequence[str]) -> None: ...


def fork(ask: Ask, caller: socket.socket, preload: Preload, model: str) -> None:
    """Forks an engine that answers to `caller` by itself; returns in this process alone."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    try:
        if os.fork():
            os._exit(0)
        # Only now is it nobody's child but the subreaper's.
        settle(ask, caller.fileno())
        send(caller, {"pid": os.getpid(), "model": model})
        caller.settimeout(GO_SECONDS)
        if line(caller) != b"go":
            os._exit(0)
        caller.close()
        status = run(ask, preload.in_child)
    except BaseException:  # noqa: BLE001 - nothing of the zygote may run on in a child
        traceback.print_exc()
        status = 1
    os._exit(status)


def line(sock: socket.socket) -> bytes:
    """One line without its end; empty when the other side hung up. Raises OSError, ValueError for one too long."""
    data = bytearray()
    while not data.endswith(b"\n"):
        got = sock.recv(65536)
        if not got:
            return b""
        data += got
        if len(data) > MAX_LINE:
            raise ValueError("a line of more than a mebibyte")
    return bytes(data[:-1])


def send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    """One line. Raises OSError."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def settle(ask: Ask, keep: int) -> None:
    """Takes on the ask's session, environment, files and signals; only the file `keep` stays open."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    out = os.open(ask.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, stream in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(file, stream)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(ask.cwd)
    os.environ.clear()
    os.environ.update(ask.env)
    failpoints.arm(ask.env.get(failpoints.VARIABLE, ""))
    place.show(ask.argv, ask.env)


def run(ask: Ask, in_child: Callable[[Mapping[str, str]], None]) -> int:
    """Runs the engine to its end as `python -m` would; returns the exit status."""
    sys.argv = [ask.argv[2], *ask.argv[3:]]
    sys.orig_argv[:] = ask.argv
    # It was imported to have what it imports; as in `python -m`, it runs as __main__ alone.
    sys.modules.pop(ask.module, None)
    try:
        in_child(ask.env)
        runpy.run_module(ask.module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return _status(ended.code)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def asked(raw: object) -> Ask:
    """The ask in a request. Raises ValueError that says what was expected."""
    if not isinstance(raw, dict) or set(raw) != {"argv", "env", "cwd", "log"}:
        raise ValueError("expected argv, env, cwd and log")
    argv, env = raw["argv"], raw["env"]
    if not _texts(argv) or len(argv) < 3 or argv[1] != "-m":
        raise ValueError("expected argv as [interpreter, '-m', module, ...]")
    if not isinstance(env, dict) or not _texts([*env.keys(), *env.values()]):
        raise ValueError("expected env as an object of texts")
    if not _texts([raw["cwd"], raw["log"]]):
        raise ValueError("expected cwd and log as paths")
    return Ask(tuple(argv), env, raw["cwd"], raw["log"])


def _texts(words: Sequence[object]) -> bool:
    return isinstance(words, list) and all(isinstance(w, str) and "\0" not in w for w in words)
