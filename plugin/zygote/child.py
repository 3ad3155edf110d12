"""What a forked child does to become the engine that was asked for: its own environment, files and command line."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relight.plugin.zygote import place


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
