"""An agent whose engine `sglang` is the double, and models for it; archives of the real packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Fixtures: they are found by being imported, and are asked for by their names.
from integration.agent.conftest import fleet, make_slot  # noqa: F401
from support.agent import Slot

DOUBLE = Path(__file__).parent / "double"
WEIGHT_BYTES = 16 << 20


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has SGLang as far as anybody can see: the double, and Relight beside it."""
    path = tmp_path / "python"
    roots = f"{DOUBLE}:{Path(__file__).parents[2] / 'src'}"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={roots} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Directories of models: `model(1)` has other weights than `model(2)`, of the same shapes."""

    def make(number: int = 1, size: int = WEIGHT_BYTES) -> Path:
        path = tmp_path / f"model-{number}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({"architectures": ["DoubleForCausalLM"]}))
        (path / "weights.bin").write_bytes(bytes([number]) * size)
        return path

    return make


@pytest.fixture
async def agent(make_slot: Callable[..., Slot], python: Path) -> Slot:  # noqa: F811
    """An agent that runs; what it starts says in `double.calls` what was asked of it."""
    slot = make_slot(engines={"sglang": {"python": str(python)}}, compile_cache={"enabled": False})
    await slot.up()
    return slot


def calls(slot: Slot, name: str, *, of: str = "") -> list[Any]:
    """What was asked of an instance's engine, in order: [method, route, body] each, or those of one route."""
    path = slot.directory / "state" / "i" / name / "double.calls"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if not of or line[1] == of]
