"""The images' Dockerfiles: linted, and what they install holds what the pods of a cluster run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.chart.helm import ROOT

pytestmark = [pytest.mark.chart, pytest.mark.timeout(300)]

IMAGES = ROOT / "deploy" / "images"
LINTER = ROOT / ".cache" / "chart" / "bin" / "hadolint"
FILES = sorted(IMAGES.glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=[f.name for f in FILES])
def test_the_linter_finds_nothing(file: Path) -> None:
    done = subprocess.run(
        [LINTER, "--config", IMAGES / ".hadolint.yaml", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def _stages(file: Path) -> dict[str, str]:
    """Text of each stage by its name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", file.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_what_is_run_is_no_root_has_no_compiler_and_is_a_program_of_the_project() -> None:
    stages = _stages(IMAGES / "relight.Dockerfile")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert "USER 65532:65532" in stages["base"]
    for name in ("controller", "gateway", "agent"):
        assert "RUN" not in stages[name]
        assert f'ENTRYPOINT ["relight-{name}"]' in stages[name]
        assert f"relight-{name}" in scripts
    assert "apt-get" not in stages["base"]


def test_everything_that_is_copied_is_there_and_let_through() -> None:
    let_through = {
        line[1:] for line in (IMAGES / "relight.Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (IMAGES / "relight.Dockerfile").read_text(), flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == let_through
    assert all((ROOT / source).exists() for source in sources)


def test_the_wheel_that_images_install_brings_supervisor_and_plugin_for_engines(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*build, _copy(tmp_path)], check=True, timeout=200, capture_output=True)
    installed, shared = tmp_path / "installed", tmp_path / "shared"
    with zipfile.ZipFile(next(tmp_path.glob("relight-*.whl"))) as wheel:
        wheel.extractall(installed)
    # No site of this checkout, and libraries alone: what of Relight is not in the wheel is not there.
    places = f"{installed}{os.pathsep}{sysconfig.get_path('purelib')}"
    env = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "relight.agent.inject", shared], env=env, text=True, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (shared / "bin" / "relight-supervisor").exists()
    assert {p.name for p in (shared / "lib" / "relight").iterdir()} == {"agent", "core", "plugin", "transfer"}
    assert {"elftools", "xxhash"} <= {p.name for p in (shared / "lib").iterdir()}
    # As engines find it: by the metadata that an installed package would have.
    code = (
        "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='vllm.general_plugins')))"
    )
    alone = {"PATH": os.environ["PATH"], "PYTHONPATH": str(shared / "lib")}
    found = subprocess.run([sys.executable, "-S", "-c", code], env=alone, text=True, capture_output=True, timeout=60)
    metadata = tomllib.loads((ROOT / "packaging" / "engine" / "pyproject.toml").read_text())["project"]
    assert found.stdout.split() == [metadata["entry-points"]["vllm.general_plugins"]["relight"]]


def _copy(folder: Path) -> Path:
    """What the Dockerfile copies: a build must not leave anything in the checkout."""
    source = folder / "source"
    source.mkdir()
    for name in ("core", "transfer", "agent", "controller", "gateway", "protos", "plugin", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    return source
