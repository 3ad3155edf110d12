"""Fleets whose vLLM is a double (vllm_double): Relight's own part inside an engine, without a model around it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from support.controlplane import FakeGateway, Running, model

HERE = Path(__file__).resolve().parent
F = TypeVar("F")


def python(directory: Path, **variables: str) -> Path:
    """An interpreter whose vLLM is the double, with these variables."""
    path = directory / "-".join(["python", *variables.values()])
    paths = os.pathsep.join(map(str, (HERE / "vllm_double", HERE.parents[1] / "src")))
    told = " ".join(f"{name}={value}" for name, value in variables.items())
    path.write_text(f'#!/bin/sh\nexec env PYTHONPATH={paths} {told} {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@asynccontextmanager
async def doubles(
    kind: Callable[..., F], mebibytes: int, changes: dict[str, Any], **agents: Any
) -> AsyncIterator[F]:  # fmt: skip
    """A fleet (`kind` as in test_compile_cache_ring) of one model with `changes`, and agents as they are added."""
    with tempfile.TemporaryDirectory(prefix="rl-") as directory:
        root = Path(directory)
        home = root / "model"
        home.mkdir()
        (home / "config.json").write_text(json.dumps({"mebibytes": mebibytes}))
        running = await Running.start(root, models=[model(uri=str(home), engine="vllm", **changes)])
        engines = {"vllm": {"python": str(python(root)), "zygote": False}}
        made: Any = kind(root, running, **{"engines": engines, "compile_cache": {"enabled": False}, **agents})
        door = FakeGateway(running.rpc)
        door.attach()
        try:
            yield made
        finally:
            for slot in made.slots.values():
                with suppress(ProcessLookupError):
                    slot.process.send_signal(signal.SIGCONT)
                await slot.down()
                for log in slot.directory.rglob("*.log"):
                    print(f"--- {log}\n{log.read_text()[-3000:]}")
            await door.detach()
            await running.stop()
