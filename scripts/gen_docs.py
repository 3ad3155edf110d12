"""Writes what is taken from code: the machine file's JSON schema, the OpenAPI document, the command line's help, the
definitions that a cluster installs, the page of metrics, dashboards and alert rules, and parts of the Helm chart.

`--check` fails when a file differs from what the code says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dashboards.all
import typer
import yaml
from typer.testing import CliRunner

import chart
from relight.controller.api.app import openapi_document
from relight.controller.cli.machine import MachineConfig
from relight.controller.cli.main import app
from relight.controller.kubernetes.definitions import definitions

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def _words(command: Any, above: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every command and group, by the words that call it."""
    yield list(above)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _words(inner, (*above, name))


def _cli() -> str:
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"})
    command = typer.main.get_command(app)
    parts = ["# The command line\n\nWritten by `make docs`; do not edit.\n"]
    for words in _words(command):
        said = runner.invoke(app, [*words, "--help"], prog_name="relight")
        parts.append(f"## {' '.join(['relight', *words])}\n\n```\n{said.stdout.strip()}\n```\n")
    return "\n".join(parts)


def documents() -> dict[Path, str]:
    """Path -> content."""
    schema = MachineConfig.model_json_schema()
    return {
        DOCS / "machine.schema.json": json.dumps(schema, indent=2) + "\n",
        DOCS / "openapi.json": json.dumps(openapi_document(), indent=2) + "\n",
        DOCS / "cli.md": _cli(),
        ROOT / "deploy" / "kubernetes" / "definitions.yaml": _definitions(),
        **{ROOT / path: text for path, text in dashboards.all.documents().items()},
        **chart.documents(_definitions()),
    }


def _definitions() -> str:
    said = "# Written by `make docs`; do not edit.\n"
    return said + yaml.dump_all(definitions(), Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """Without anchors: what two schemas share is written twice, for whoever reads one of them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = documents()
    stale = [p for p, text in made.items() if not p.exists() or p.read_text() != text]
    if check and stale:
        print(f"stale: {', '.join(str(p.relative_to(ROOT)) for p in stale)}; run `make docs`", file=sys.stderr)
        return 1
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[path])
    print(f"docs: {len(stale)} file(s) {'stale' if check else 'written'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
