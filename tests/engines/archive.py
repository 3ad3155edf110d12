"""Reads the engines' own source: parsed, never imported. What is asked of it is a name in a file."""

from __future__ import annotations

import ast
import configparser
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ARCHIVES = Path(__file__).parents[2] / ".cache" / "engine-archives"


class Source:
    """One release: its files by path, each parsed once."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = frozenset(self._zip.namelist())
        self._trees: dict[str, ast.Module] = {}

    def files(self, where: str) -> list[str]:
        """The file `where`, or every Python file below the folder `where`, which ends with `/`."""
        if where.endswith("/"):
            return sorted(n for n in self._names if n.startswith(where) and n.endswith(".py"))
        return [where] if where in self._names else []

    def tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(self._zip.read(file))
        return self._trees[file]

    def module(self, name: str) -> str | None:
        """The file of a module by its dotted name."""
        path = name.replace(".", "/")
        return next((n for n in (f"{path}.py", f"{path}/__init__.py") if n in self._names), None)

    def entry_points(self) -> dict[str, dict[str, str]]:
        """By group: name and object. Of a wheel; a source distribution has none written out."""
        found = next((n for n in self._names if n.endswith(".dist-info/entry_points.txt")), None)
        parser = configparser.ConfigParser(delimiters=("=",))
        # Names of entry points keep their case: the standard library documents this assignment.
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(self._zip.read(found).decode() if found else "")
        return {group: dict(parser[group]) for group in parser.sections()}


@cache
def source(package: str, version: str) -> Source:
    """Raises FileNotFoundError where `make setup-archives` was not run."""
    return Source(ARCHIVES / f"{package}-{version}.zip")


def find(tree: ast.AST, path: str) -> ast.AST | None:
    """What a dotted name stands for among classes and functions, nested ones too, or an assigned name."""
    node: ast.AST | None = tree
    for part in path.split("."):
        node = next((n for n in _defined(node) if part in _names(n)), None) if node else None
    return node


def _defined(node: ast.AST) -> Iterator[ast.AST]:
    """What stands directly in a body, under `if` and `try` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _defined(child)
        elif _names(child):
            yield child


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
    return []


def parameters(node: ast.AST) -> set[str]:
    """Names that a function takes."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    spec = node.args
    return {a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}


def words(node: ast.AST) -> set[str]:
    """Every name, attribute, keyword and text that stands in it, and the kinds of statements, as `assert`."""
    found: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word):
                found.add(word)
            case ast.Constant(value=str(word)):
                found.add(word)
            case ast.Assert():
                found.add("assert")
            case ast.Raise():
                found.add("raise")
    return found


def routes(tree: ast.Module) -> set[tuple[str, str]]:
    """(method, path) of every function that a decorator serves."""
    found = set()
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", ()):
            match decorator:
                case ast.Call(
                    func=ast.Attribute(attr=verb), args=[ast.Constant(value=str(path)), *_], keywords=options
                ):
                    methods = [verb.upper()]
                    for option in options:
                        if option.arg == "methods" and isinstance(option.value, ast.List):
                            methods = [str(e.value) for e in option.value.elts if isinstance(e, ast.Constant)]
                    found |= {(method, path) for method in methods}
    return found


def flags(tree: ast.Module) -> set[str]:
    """Every option: of `add_argument`, an alias, or the field of a class of arguments."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=names):
                found |= {a.value for a in names if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            case ast.keyword(arg="aliases", value=ast.List(elts=names)):
                found |= {a.value for a in names if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add("--" + name.replace("_", "-"))
    return found
