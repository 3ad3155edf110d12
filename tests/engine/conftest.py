"""Session-wide machines with real vLLM: starting an engine costs most of a minute, so tests share them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live import EAGER, ENGINE_PYTHON, ROOT, Live

START_TIMEOUT = 600


def _need_engine() -> None:
    # A missing part fails by name; nothing is skipped in silence.
    assert ENGINE_PYTHON.exists(), "no engine environment: run `make setup-engine`"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    _need_engine()
    path = ROOT / ".cache" / "tiny-qwen3"
    script = ROOT / "scripts" / "make_tiny_model.py"
    if not (path / "model.safetensors").exists():
        subprocess.run([str(ENGINE_PYTHON), str(script), str(path)], check=True, timeout=120)
    return path


def _live(directory: Path, model: dict[str, object]) -> Iterator[Live]:
    machine = Live(directory, model)
    try:
        machine.up()
        yield machine
    finally:
        machine.down()


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A tiny model: one replica, one guardian. The first bytes that each engine receives are altered on the way."""
    model = {
        "name": "tiny", "uri": str(tiny_model), "args": [*EAGER, "--kv-cache-memory-bytes=33554432"],
        "env": {"RELIGHT_FAILPOINTS": "transfer.receive=1*corrupt"},
    }  # fmt: skip
    yield from _live(tmp_path_factory.mktemp("t"), model)


@pytest.fixture
def one(tiny: Live) -> Live:
    """The tiny machine at rest: one replica ready, the other instance dormant."""
    tiny.scaled(1)
    return tiny


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The demo's model. A source kills itself, as by kill -9, in the middle of the first transfer from it."""
    _need_engine()
    path = ROOT / ".cache" / "smollm2"
    assert (path / "model.safetensors").exists(), "no demo model: run `make setup`"
    model = {
        "name": "smollm2", "uri": str(path), "args": [*EAGER, "--kv-cache-memory-bytes=134217728"],
        "env": {"RELIGHT_FAILPOINTS": "transfer.source.serve=7*exit"},
        # Starts would read from a peer too, and be what kills it.
        "rungs": ["disk"],
    }  # fmt: skip
    yield from _live(tmp_path_factory.mktemp("d"), model)
