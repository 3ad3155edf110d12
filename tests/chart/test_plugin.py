"""`kubectl relight`: a real kubectl finds the plugin, runs it with its statuses, and completes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chart.helm import ROOT
from tests.kubernetes.plane import BINARIES
from tests.kubernetes.slots import SOURCES

pytestmark = [pytest.mark.chart, pytest.mark.timeout(120)]
PROGRAMS = {"kubectl-relight": "main", "kubectl_complete-relight": "complete"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the plugin's programs on PATH, as an installation puts them there."""
    for name, function in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\nfrom relight.controller.cli.kubectl import {function}\n{function}()\n")
        program.chmod(0o755)
    path = f"{tmp_path}:{BINARIES}:{os.environ['PATH']}"
    state = {"RELIGHT_STATE": str(tmp_path / "state"), "PYTHONPATH": str(SOURCES)}
    return {**os.environ, "PATH": path, **state}


def kubectl(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *words], env=environment, text=True, capture_output=True, timeout=60, check=False
    )  # fmt: skip


def test_an_installation_brings_both_programs() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, function in PROGRAMS.items():
        assert f'{name} = "relight.controller.cli.kubectl:{function}"' in text


def test_kubectl_finds_it(environment: dict[str, str]) -> None:
    assert "kubectl-relight" in kubectl(environment, "plugin", "list").stdout


def test_it_is_the_command_line_under_kubectls_name_and_with_its_statuses(environment: dict[str, str]) -> None:
    said = kubectl(environment, "relight", "--help")
    assert (said.returncode, said.stdout.split("\n")[0]) == (0, "Usage: kubectl relight [OPTIONS] COMMAND [ARGS]...")
    missing = kubectl(environment, "relight", "status")
    assert missing.returncode == 4
    assert "nothing is up" in missing.stderr
    assert "kind: CustomResourceDefinition" in kubectl(environment, "relight", "definitions").stdout


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        (["relight", "sca"], {"scale"}),
        (["relight", "cache", "rel"], {"release"}),
        (["relight", "scale", "--na"], {"--namespace"}),
        (["relight", "status", "--output", ""], {"table", "json"}),
    ],
)
def test_kubectl_completes_its_words(environment: dict[str, str], typed: list[str], candidates: set[str]) -> None:
    # What shells call when somebody presses the key.
    lines = kubectl(environment, "__complete", *typed).stdout.splitlines()
    assert {line.partition("\t")[0] for line in lines[:-1]} == candidates
    assert lines[-1] == ":4"
