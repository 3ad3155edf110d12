"""Regenerates the Python code of every .proto file in place; `--check` fails when it differs from the tree."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def generate(out: Path) -> list[Path]:
    """Writes the generated modules below `out` and returns their paths relative to it."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    packages = sorted({str(Path(s).parent).replace("/", ".") for s in sources})
    include = str(files("grpc_tools") / "_proto")
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{include}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out={out}",
    ]
    # protoc looks its mypy plugin up on PATH: the one of this interpreter's environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if protoc.main([*arguments, *sources]) != 0:
        raise SystemExit("protoc failed: see the lines above")
    made = sorted(p.relative_to(out) for p in out.rglob("*_pb2*.py*"))
    for path in made:
        # The generated code lives under relight.protos, not at the top of the path.
        text = (out / path).read_text()
        for package in packages:
            name = re.escape(package)
            text = re.sub(rf"^from {name} import", f"from relight.protos.{package} import", text, flags=re.M)
            text = re.sub(rf"^import {name}\.", f"import relight.protos.{package}.", text, flags=re.M)
            if path.suffix == ".pyi":
                text = re.sub(rf"(?<![\w.]){name}\.(\w+_pb2)", rf"relight.protos.{package}.\1", text)
        (out / path).write_text(text)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        stale = []
        for path in generate(out):
            fresh, kept = (out / path).read_text(), PROTOS / path
            if not kept.exists() or kept.read_text() != fresh:
                stale.append(str(path))
                if not check:
                    kept.write_text(fresh)
    if check and stale:
        print("generated code differs from the .proto files; run `make protos`: " + ", ".join(stale), file=sys.stderr)
        return 1
    print(f"protos: {len(stale)} file(s) {'stale' if check else 'written'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
