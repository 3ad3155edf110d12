"""`relight-inject DIR`: puts into a shared directory what an engine's container needs of Relight and its image lacks.

The supervisor and the plugin need nothing but a Python and what the engine has already; so they are copied, not
installed, and the engine's image stays the user's own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path

PARTS = ("core", "transfer", "plugin", "agent")
LIBRARIES = ("elftools", "xxhash")
"""What the plugin needs besides, and engines' images need not have."""
MODULES = ("pynvml",)
"""The same of single files: what NVIDIA's devices are read by."""
WHEELS = Path(sys.prefix) / "share" / "relight" / "wheels"
"""Wheels of those libraries for other interpreters than this one: the compiled parts of all lie side by side."""
PLUGINS = {"vllm.general_plugins": {"relight": "relight.plugin.vllm.register:register"}}
"""Where engines look for plugins, as an installed relight-engine would say it."""
_PYTHON = """#!/bin/sh
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
export PYTHONPATH="$here/lib${PYTHONPATH:+:$PYTHONPATH}"
socket="$1/s/supervisor.sock"
"""
PROGRAMS = {
    # Process 1 of the engine's container: owns engines and zygotes, and outlives the agent that tells it what to start.
    # Beside it devices are read for the agent, whose container has none; begun anew whenever that ends, but (status 3)
    # where there is no accelerator.
    "relight-supervisor": """mkdir -p "$1/s"
while kill -0 $$ 2> /dev/null; do
  "${RELIGHT_PYTHON:-python3}" -m relight.agent.devices.reader --socket "$1/s/devices.sock" --beside $$
  [ $? -eq 3 ] && break
  sleep 1
done &
exec "${RELIGHT_PYTHON:-python3}" -m relight.agent.supervisor --socket "$socket" --journal "$1/supervisor.journal"
""",
    # Before a container is ended: waits until the controller has moved what runs here elsewhere.
    "relight-leave": """exec "${RELIGHT_PYTHON:-python3}" -m relight.agent.supervisor.leave --socket "$socket"
""",
}


def main() -> int:
    """Exit status 0 when all of it is there, 2 when it cannot be written."""
    parser = argparse.ArgumentParser(prog="relight-inject", description=__doc__)
    parser.add_argument("directory", type=Path, help="shared with the engine's container")
    directory = parser.parse_args().directory
    try:
        inject(directory)
    except OSError as error:
        print(f"relight-inject: {error}", file=sys.stderr)
        return 2
    print(f"relight-inject: {', '.join(PARTS)} are in {directory}", flush=True)
    return 0


def inject(directory: Path, wheels: Path = WHEELS) -> None:
    """Writes `lib` and `bin` below `directory`; what an earlier version left there is replaced whole."""
    library = directory / "lib"
    shutil.rmtree(library, ignore_errors=True)
    for name, place in (*((f"relight.{p}", f"relight/{p}") for p in PARTS), *((n, n) for n in LIBRARIES)):
        source = Path(import_module(name).__path__[0])
        shutil.copytree(source, library / place, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in MODULES:
        shutil.copy(str(import_module(name).__file__), library)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(library, [n for n in archive.namelist() if n.partition("/")[0] in LIBRARIES])
    _register(library)
    for name, text in PROGRAMS.items():
        program = directory / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(_PYTHON + text)
        program.chmod(0o755)


def _register(library: Path) -> None:
    version = metadata.version("relight")
    told = library / f"relight_engine-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: relight-engine\nVersion: {version}\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in PLUGINS.items()]
    (told / "entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
