"""How each kind of contract is looked up in an engine's source: what is missing, in words, or nothing."""

from __future__ import annotations

import ast

from tests.engines.archive import Source, find, flags, parameters, routes, words
from tests.engines.contracts import Contract


def broken(contract: Contract, source: Source) -> str:
    """Empty when the engine keeps it."""
    if contract.kind == "entry":
        group, _, name = contract.what.partition(": ")
        return "" if name in source.entry_points().get(group, {}) else f"no entry point {name} in {group}"
    files = [file for where in contract.where.split("|") for file in source.files(where)]
    if not files:
        return f"{contract.where} is not there"
    trees = [source.tree(file) for file in files]
    match contract.kind:
        case "route":
            method, _, path = contract.what.partition(" ")
            return "" if any((method, path) in routes(t) for t in trees) else f"no route {contract.what}"
        case "flag":
            return "" if any(contract.what in flags(t) for t in trees) else f"no option {contract.what}"
        case "env":
            return "" if any(contract.what in words(t) for t in trees) else f"it reads no {contract.what}"
        case "symbol":
            return "" if any(find(t, contract.what) for t in trees) else f"no {contract.what}"
        case "field":
            return _field(contract.what, trees)
        case "does" | "lacks":
            return _says(contract, trees)
    raise ValueError(contract.kind)


def _field(what: str, trees: list[ast.Module]) -> str:
    if what.endswith(")"):
        function, _, parameter = what[:-1].partition("(")
        found = [node for t in trees if (node := find(t, function))]
        return "" if any(parameter in parameters(node) for node in found) else f"{function} takes no {parameter}"
    if what.endswith("]"):
        function, _, word = what[:-1].partition("[")
        found = [node for t in trees if (node := find(t, function))]
        return "" if any(word.strip("'") in words(node) for node in found) else f"{function} says no {word}"
    return "" if any(find(t, what) for t in trees) else f"no {what}"


def _says(contract: Contract, trees: list[ast.Module]) -> str:
    place, _, word = contract.what.partition(": ")
    found: list[ast.AST] = list(trees) if place.endswith("/") else [n for t in trees if (n := find(t, place))]
    if not found:
        return f"no {place}"
    said = any(word in words(node) for node in found)
    if contract.kind == "does":
        return "" if said else f"{place} does without {word}"
    return f"{place} has {word} now" if said else ""
