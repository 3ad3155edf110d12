"""What the Helm chart takes from code and from its own values: definitions, values.schema.json, the README's table.

Every key of values.yaml is in the schema by its default's type, closed at every level; TYPES and AT say what a default
cannot. Fields of Relight's resources and of `agent.json` come from the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from chart_types import AT, TYPES

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "relight"
BEGIN, END = "<!-- values: written by `make docs` from values.yaml -->", "<!-- end of values -->"
Schema = dict[str, Any]


def documents(definitions: str) -> dict[Path, str]:
    """Path -> content, of the files of the chart that are made."""
    values = (CHART / "values.yaml").read_text()
    return {
        CHART / "crds" / "definitions.yaml": definitions,
        CHART / "values.schema.json": json.dumps(schema(yaml.safe_load(values)), indent=1) + "\n",
        CHART / "README.md": readme((CHART / "README.md").read_text(), values),
    }


def schema(values: dict[str, Any]) -> Schema:
    """The JSON schema (draft 7, which both Helms know) of these values."""
    unused = set(AT)
    found = _of(values, (), unused)
    if unused:
        raise SystemExit(f"chart_types.AT names what values.yaml has not: {', '.join(sorted(unused))}")
    # Helm puts its own in there for charts above this one.
    found["properties"]["global"]["additionalProperties"] = True
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


def _of(value: Any, path: tuple[str, ...], unused: set[str]) -> Schema:
    where = ".".join(path)
    if where in AT:
        unused.discard(where)
        return AT[where]
    if path and path[-1] in TYPES:
        return TYPES[path[-1]]
    if isinstance(value, dict) and value:
        properties = {key: _of(inner, (*path, key), unused) for key, inner in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    kinds = {bool: "boolean", int: "integer", str: "string"}
    if type(value) not in kinds:
        raise SystemExit(f"values.yaml: {where} has no type of its own: give it one in chart_types.py")
    return {"type": kinds[type(value)], **({"minimum": 0} if type(value) is int else {})}


def readme(text: str, values: str) -> str:
    """The README with the table of `values` between its marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    rows = [f"| `{key}` | {said} | {default} |" for key, said, default in described(values)]
    table = "\n".join(["| key | what it is | default |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def described(values: str) -> Iterator[tuple[str, str, str]]:
    """(key, its `# --` comment, default) of all that is commented so."""
    lines = values.splitlines()
    root = yaml.compose(values)
    yield from _described(root, (), lines)


def _described(node: Any, path: tuple[str, ...], lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        inner = (*path, key.value)
        said = _comment(lines, key.start_mark.line)
        if said:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            shown = f"`{default}`" if len(default) <= 40 else "see values.yaml"
            yield ".".join(inner), said.replace("|", "\\|"), shown
        elif isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _described(value, inner, lines)
        else:
            raise SystemExit(f"values.yaml: {'.'.join(inner)} has no `# --` comment")


def _comment(lines: list[str], line: int) -> str:
    found = []
    while line > 0 and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        found.insert(0, lines[line].strip().removeprefix("#").strip())
        if found[0].startswith("-- "):
            return " ".join([found[0].removeprefix("-- "), *found[1:]])
    return ""
