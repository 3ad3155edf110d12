"""What a zygote of stub engines imports, with its faults: each is had by a signal or a variable, for tests."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence

FAULT = "STUB_ZYGOTE"
"""`thread`: a thread is left by the import; `import`: the import fails."""


def preload() -> None:
    """Imports the stub engine. SIGUSR1 then starts a thread, as a careless library would later."""
    importlib.import_module("relight.agent.engines.stub_server")
    signal.signal(signal.SIGUSR1, lambda *_: _thread())
    match os.environ.get(FAULT):
        case "thread":
            _thread()
        case "import":
            raise ImportError("configured failure")


def in_child(env: Mapping[str, str]) -> None:
    """Nothing of a stub's is read at import."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _thread() -> None:
    threading.Thread(target=threading.Event().wait, daemon=True, name="left-behind").start()


def model_of(argv: Sequence[str]) -> str:
    """A stub's model is its settings."""
    return argv[argv.index("--settings") + 1] if "--settings" in argv else ""


def prepare(argv: Sequence[str]) -> None:
    """A stub has nothing to read."""
