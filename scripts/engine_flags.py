"""Writes which flags one version of an engine takes, for the doctor (controller/doctor/flags).

    .venv-engine/bin/python scripts/engine_flags.py vllm                   # asked of the parser of what is installed
    .venv/bin/python scripts/engine_flags.py vllm 0.33.0 vllm-0.33.0.zip   # read from source that nobody can run here

Read from source the list holds what the parser is given by name, and the denial of each: flags too many at worst, so
that nothing is called unknown that is known. Of a list that is there already the source has to show everything.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "controller" / "doctor" / "flags"
SOURCES = {
    "vllm": re.compile(r"vllm/engine/arg_utils\.py|vllm/entrypoints/(launchers|common)/cli_args\.py"),
    "sglang": re.compile(r"sglang/srt/(server_args|arg_groups/fields/\w+)\.py"),
}
"""Where an engine's flags stand in its source."""
FIELDS = {"vllm": re.compile(r"(?!.*Engine)\w+Args"), "sglang": re.compile(r"\w+")}
"""Classes of these files whose fields are flags."""


def asked() -> set[str]:
    """Of `vllm serve` as it is installed, with the forms that deny and shorten."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)


def read(engine: str, archive: Path) -> set[str]:
    """Of an archive's source text. Raises ValueError where that has no flags."""
    found = {"--help", "-h"}
    with zipfile.ZipFile(archive) as source:
        for name in source.namelist():
            if SOURCES[engine].fullmatch(name):
                found |= _flags(ast.parse(source.read(name)), FIELDS[engine])
    if len(found) < 100:
        raise ValueError(f"{archive}: its flags stand elsewhere than {SOURCES[engine].pattern}")
    return found | {f"--no-{flag[2:]}" for flag in found if flag.startswith("--") and not flag.startswith("--no-")}


def _flags(tree: ast.AST, fields: re.Pattern[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"--?[a-z][\w-]*", node.value)
        ):
            found.add(node.value)
        if isinstance(node, ast.ClassDef) and fields.fullmatch(node.name):
            names = [f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
            found |= {"--" + name.replace("_", "-") for name in names}
    return found


def main() -> int:
    """Exit status 2 for arguments that are none."""
    if sys.argv[1:] == ["vllm"]:
        engine, number, flags = "vllm", version("vllm").partition("+")[0], asked()
    elif len(sys.argv) == 4 and sys.argv[1] in SOURCES:
        engine, number, flags = sys.argv[1], sys.argv[2], read(sys.argv[1], Path(sys.argv[3]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    known = FOLDER / f"{engine}-{number}.txt"
    if len(sys.argv) == 4 and known.is_file() and (lacking := set(known.read_text().split()) - flags):
        print(f"{known}: the source does not show {', '.join(sorted(lacking))}", file=sys.stderr)
        return 1
    if len(sys.argv) == 2 or not known.is_file():
        known.write_text("\n".join(sorted(flags)) + "\n")
    print(f"{known}: {len(known.read_text().splitlines())} flags")
    return 0


if __name__ == "__main__":
    sys.exit(main())
