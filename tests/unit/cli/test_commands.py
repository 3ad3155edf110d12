"""Wrong input to each command: one line that says what to do, the documented exit status, nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "relight.controller.cli"]


def run(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RELIGHT_STATE": str(state)}
    env.pop("RELIGHT_SERVER", None)
    env.pop("RELIGHT_TOKEN", None)
    return subprocess.run([*COMMAND, *words], env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("up", "-f", "none.yaml"), 2, "a readable YAML file"),
        (("up",), 2, "Missing option"),
        (("status",), 4, "run `relight up -f FILE`"),
        (("models",), 4, "run `relight up -f FILE`"),
        (("instances", "--output", "xml"), 2, "xml"),
        (("devices",), 4, "run `relight up -f FILE`"),
        (("scale", "m", "-1"), 2, "-1"),
        (("scale", "m", "many"), 2, "a valid integer"),
        (("scale", "m"), 2, "Missing argument"),
        (("plan", "m", "2"), 4, "run `relight up -f FILE`"),
        (("watch", "--since", "-4"), 2, "greater than or equal to 0"),
        (("timeline", "i-x"), 4, "run `relight up -f FILE`"),
        (("timeline", "i-x", "--format", "svg"), 2, "svg"),
        (("timeline", "i-x", "--file", "x.json"), 2, "with --format chrome or otlp"),
        (("explain",), 2, "Missing argument"),
        (("explain", "i-x"), 4, "run `relight up -f FILE`"),
        (("doctor",), 4, "run `relight up -f FILE`"),
        (("logs",), 2, "Missing argument"),
        (("logs", "i-x", "--tail-bytes", "999999999"), 2, "less than or equal to"),
        (("cache", "list"), 4, "run `relight up -f FILE`"),
        (("cache", "show"), 2, "Missing argument"),
        (("cache", "diff", "abcd"), 2, "Missing argument"),
        (("cache", "release", "abcd"), 4, "run `relight up -f FILE`"),
        (("cache", "export", "there"), 4, "--config"),
        (("cache", "import", "there", "--config", "none.json"), 3, "none.json cannot be read"),
        (("fly",), 2, "fly"),
        (("status", "--server", "http://127.0.0.1:9"), 2, "RELIGHT_TOKEN"),
        (("definitions", "--apply", "--kubeconfig", "none.yaml"), 2, "no way to the Kubernetes API"),
        (("purge", "--kubeconfig", "none.yaml"), 2, "no way to the Kubernetes API"),
        (("purge", "--patience", "-1"), 2, "greater than or equal to 0"),
    ],
)
def test_wrong_input_says_what_to_do(tmp_path: Path, words: tuple[str, ...], status: int, told: str) -> None:
    done = run(tmp_path / "state", *words)
    assert done.returncode == status, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state").exists()


def test_an_unreachable_controller_is_a_status_of_its_own(tmp_path: Path) -> None:
    env = {**os.environ, "RELIGHT_TOKEN": "t"}
    done = subprocess.run(
        [*COMMAND, "models", "--server", "http://127.0.0.1:9"], env=env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "no controller answers at http://127.0.0.1:9" in done.stderr


def test_an_authority_that_is_no_file_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    env = {**os.environ, "RELIGHT_TOKEN": "t", "RELIGHT_CA": str(tmp_path / "none.pem")}
    done = subprocess.run(
        [*COMMAND, "models", "--server", "https://127.0.0.1:9"], env=env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "RELIGHT_CA: expected a PEM file of an authority" in done.stderr


def test_down_with_nothing_up_says_so(tmp_path: Path) -> None:
    done = run(tmp_path / "state", "down")
    assert done.returncode == 0
    assert "nothing was up" in done.stdout


@pytest.mark.parametrize(
    "command",
    ["up", "down", "status", "models", "instances", "devices", "scale", "plan", "watch", "timeline", "explain", "logs",
     "definitions", "purge", "doctor", "capabilities", "suggest"],
)  # fmt: skip
def test_every_command_has_help_with_an_example(tmp_path: Path, command: str) -> None:
    done = run(tmp_path, command, "--help")
    assert done.returncode == 0
    assert f"Example: relight {command}" in done.stdout
