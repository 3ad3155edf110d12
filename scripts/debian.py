"""The distribution's own packages and sources, fetched and unpacked into a folder; nothing is installed.

Works without root. apt checks every signature against the machine's own sources and keys.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCES = Path("/etc/apt")


class Debian:
    """apt with lists, archives and sources of its own below `work`: the machine's may be missing, and are not ours."""

    def __init__(self, work: Path, run: Callable[..., None], *, what_for: str) -> None:
        for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar"):
            if shutil.which(tool) is None:
                raise SystemExit(f"setup: {tool} is missing: {what_for} made of Debian's packages")
        self._run, self._work, self._archives = run, work, work / "archives"
        for folder in (work / "lists" / "partial", self._archives / "partial"):
            folder.mkdir(parents=True)
        self._options = [
            "-q", "-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work}",
            "-o", f"Dir::Cache::archives={self._archives}", "-o", "APT::Sandbox::User=", "-o", "Debug::NoLocking=1",
        ]  # fmt: skip

    def update(self, *, sources: bool = False) -> None:
        """Fetches the lists; with `sources` those of source packages beside them."""
        if sources:
            self._options += self._with_sources()
        self._run("apt-get", *self._options, "update")

    def _with_sources(self) -> list[str]:
        parts = self._work / "sources.list.d"
        parts.mkdir()
        found = [SOURCES / "sources.list", *sorted((SOURCES / "sources.list.d").glob("*.list"))]
        plain = "\n".join(path.read_text() for path in found if path.is_file())
        (parts / "plain.list").write_text(plain + "\n" + re.sub(r"(?m)^deb(?=\s)", "deb-src", plain) + "\n")
        for path in (SOURCES / "sources.list.d").glob("*.sources"):
            (parts / path.name).write_text(re.sub(r"(?m)^Types:.*$", "Types: deb deb-src", path.read_text()))
        return ["-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={parts}"]

    def unpack_missing(self, packages: Sequence[str], root: Path) -> None:
        """`packages` and what they depend on, as far as this machine has not got it installed."""
        self._run(
            "apt-get", *self._options, "install", "-y", "--download-only", "--no-install-recommends", *packages
        )  # fmt: skip
        self._open(self._archives, root)

    def unpack(self, packages: Sequence[str], root: Path) -> None:
        """Exactly `packages`, whether they are installed or not."""
        into = self._work / "exactly"
        into.mkdir(exist_ok=True)
        self._run("apt-get", *self._options, "download", *packages, cwd=into)
        self._open(into, root)
        shutil.rmtree(into)

    def _open(self, archives: Path, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for package in sorted(archives.glob("*.deb")):
            self._run("dpkg-deb", "-x", package, root)

    def dependency(self, package: str, pattern: str) -> str:
        """The package matching `pattern` on which `package` depends: of a name that always means the newest."""
        listed = subprocess.run(
            ["apt-cache", *self._options[1:], "depends", package], text=True, capture_output=True, check=False,
            timeout=60,
        ).stdout  # fmt: skip
        found = re.search(rf"Depends: ({pattern})", listed)
        if not found:
            raise SystemExit(f"setup: this distribution has no package {package} that needs {pattern} (Debian 12 is)")
        return found[1]

    def source(self, package: str) -> tuple[Path, str]:
        """The upstream archive of a source package, and the package's version."""
        into = self._work / f"source-{package}"
        into.mkdir()
        self._run("apt-get", *self._options, "source", "--download-only", package, cwd=into)
        described = next(into.glob("*.dsc")).read_text()
        version = re.search(r"(?m)^Version: (?:\d+:)?(\S+)$", described)
        if version is None:
            raise SystemExit(f"setup: the source package {package} names no version")
        return next(into.glob("*.orig.tar.*")), version[1]


def found(pattern: str, root: Path) -> list[Path]:
    """What matches in the unpacked packages, then on the machine itself."""
    return [*root.glob(pattern), *Path("/").glob(pattern)]


def libraries(root: Path) -> str:
    """The search path on which unpacked programs find the libraries that came with them."""
    return ":".join(str(path) for name in ("usr/lib", "lib") for path in sorted(root.glob(f"{name}/*-linux-gnu*")))
