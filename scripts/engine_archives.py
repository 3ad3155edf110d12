"""The engines that Relight drives, as source text to be read: wheels and source distributions, pinned by digest.

None of them is installed, built or imported. Of each archive the Python files and its metadata are kept, in a zip of
its own; what compares our calls with them is tests/engines.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Archive:
    """One release: `digest` is the SHA-256 of the file that the registry serves."""

    name: str
    version: str
    digest: str
    source: bool = False
    """Whether it is a source distribution: there is no wheel without hundreds of megabytes of kernels."""


ARCHIVES = (
    Archive("vllm", "0.32.0", "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad", source=True),
    Archive("vllm", "0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112", source=True),
    Archive("sglang", "0.5.23", "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"),
    Archive("torch-memory-saver", "0.0.10", "786e18755a9af255ae692b0e19a62ff06861dbf55a19fa8545e62a100ab5a28f"),
    Archive("vllm-kunlun", "0.11.1", "b90e548395f4809a0b4aa592e2ba28f3871abc12938e46216524321bacfde8ab"),
)
_KEPT = (".py", "entry_points.txt", "METADATA")
_LEFT_OUT = ("tests/", "benchmarks/", "examples/", "docs/", "tools/", ".buildkite/", "csrc/")
_SUMS = "SUMS"
# pip asks a source distribution for its metadata although its dependencies are not wanted, which would run its build.
# This stands in for the build: it says the name and the version that were asked for, and looks at nothing.
_BACKEND = """
import os
from pathlib import Path

def prepare_metadata_for_build_wheel(directory, config_settings=None):
    name, version = os.environ["ARCHIVE_NAME"], os.environ["ARCHIVE_VERSION"]
    info = Path(directory, f"{name}-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return info.name
"""


def build(path: Path, run: Callable[..., None], say: Callable[[str], None]) -> None:
    """Fills `path`: NAME-VERSION.zip for each."""
    say("source text of the engines (140 MB to fetch, 25 MB are kept)")
    path.mkdir(parents=True)
    sums = []
    for archive in ARCHIVES:
        with tempfile.TemporaryDirectory(dir=path) as scratch:
            fetched = _fetch(Path(scratch), archive, run)
            kept = path / f"{archive.name}-{archive.version}.zip"
            with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as into:
                for name, text in _members(fetched):
                    into.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)
            sums.append(f"{_digest(kept)}  {kept.name}\n")
    (path / _SUMS).write_text("".join(sums))


def _fetch(scratch: Path, archive: Archive, run: Callable[..., None]) -> Path:
    """By pip, which checks the digest."""
    pinned, stand_in, into = scratch / "requirement.txt", scratch / "backend", scratch / "got"
    pinned.write_text(f"{archive.name}=={archive.version} --hash=sha256:{archive.digest}\n")
    (stand_in / "setuptools").mkdir(parents=True)
    (stand_in / "setuptools" / "__init__.py").touch()
    (stand_in / "setuptools" / "build_meta.py").write_text(_BACKEND)
    how = ("--no-binary", ":all:", "--no-build-isolation") if archive.source else ("--only-binary", ":all:")
    env = {
        **os.environ, "PYTHONPATH": str(stand_in), "ARCHIVE_NAME": archive.name, "ARCHIVE_VERSION": archive.version,
    }  # fmt: skip
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *how, "--dest", into,
        "-r", pinned, env=env)  # fmt: skip
    return next(into.iterdir())


def _members(fetched: Path) -> Iterator[tuple[str, bytes]]:
    """Each file that is kept, without the folder that a source distribution wraps them in."""
    if fetched.suffix == ".whl":
        with zipfile.ZipFile(fetched) as wheel:
            for name in wheel.namelist():
                if _is_kept(name):
                    yield name, wheel.read(name)
        return
    with tarfile.open(fetched) as tree:
        for member in tree:
            name = member.name.partition("/")[2]
            file = tree.extractfile(member) if member.isfile() and _is_kept(name) else None
            if file is not None:
                with file:
                    yield name, file.read()


def _is_kept(name: str) -> bool:
    return name.endswith(_KEPT) and not name.startswith(_LEFT_OUT)


def sound(path: Path) -> bool:
    """Whether all are there, byte for byte as they were written."""
    try:
        sums = dict(reversed(line.split()) for line in (path / _SUMS).read_text().splitlines())
        names = {f"{a.name}-{a.version}.zip" for a in ARCHIVES}
        return set(sums) == names and all(_digest(path / name) == digest for name, digest in sums.items())
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
