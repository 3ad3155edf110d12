"""`make test-gpu` on machines that lack something: what runs, and what is said of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def tool(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def ran(folder: Path, *checks: str, **env: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "run.py"), *checks],
        env={"PATH": f"{folder}:/usr/bin:/bin", **env}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_machine_without_a_gpu_runs_nothing_and_says_so_for_each(tmp_path: Path) -> None:
    status, said = ran(tmp_path)
    assert status == 0
    assert said["ran"] == said["failed"] == []
    assert set(said["missing"]) == {"nvml", "memory", "engine", "peers", "graphs", "nvlink"}
    assert "no GPU" in said["missing"]["memory"]


def test_what_each_check_lacks_is_told_apart(tmp_path: Path) -> None:
    tool(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    assert "RELIGHT_GPU_PYTHON" in ran(tmp_path)[1]["missing"]["memory"]
    python = tool(tmp_path, "torch-python", 'case "$2" in *torch*) echo 1;; *) exit 1;; esac')
    _, said = ran(tmp_path, "engine", "nvlink", RELIGHT_GPU_PYTHON=str(python))
    assert said["missing"]["engine"].endswith("has no vLLM")
    assert "there are 1" in said["missing"]["nvlink"]


@pytest.mark.parametrize("status", [0, 3])
def test_a_check_that_can_run_is_run_and_its_failure_fails_the_whole(tmp_path: Path, status: int) -> None:
    tool(tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H200'")
    text = f'case "$1" in -c) echo 1;; *) exit {status};; esac'
    python = tool(tmp_path, "torch-python", text)
    got, said = ran(tmp_path, "memory", RELIGHT_GPU_PYTHON=str(python))
    assert got == (1 if status else 0)
    assert said == {"ran": ["memory"], "missing": {}, "failed": ["memory"] if status else []}
