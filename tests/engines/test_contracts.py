"""Each call that our adapters make is held to the engines' own source, and no call is made without that."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.archive import ARCHIVES, Source, find, routes, source, words
from tests.engines.contracts import BOTH, CONTRACTS, Contract
from tests.engines.reading import broken

Record = Callable[[str, object], None]
pytestmark = pytest.mark.engines
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ADAPTERS = {
    "vllm": ("vllm", "vllm_api", "vllm_handle", "vllm_outside", "vllm_places"),
    "sglang": ("sglang", "sglang_api", "sglang_handle"),
}
OURS = {"-m", "--socket", "--preload"}
"""Options of the interpreter's, and of the zygote's."""
READS = {"vllm": ("vllm_api",), "sglang": ("sglang_api",)}
"""Modules whose every key of JSON is the engine's."""
EITHER = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}
"""Where something moved between two releases: ours tries both places."""


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_the_engine_keeps_what_our_adapters_take_for_granted(contract: Contract, record_property: Record) -> None:
    missing = {v: why for v in contract.versions if (why := broken(contract, source(contract.package, v)))}
    assert not missing, f"{contract.used} rests on it: {missing}"
    for version in contract.versions:
        record_property("contracts_checked", f"{contract} {version}")
        record_property("versions", f"{contract.package} {version}")


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_every_contract_names_a_function_of_ours_that_is_there(contract: Contract) -> None:
    parts = contract.used.split(".")
    paths = ((n, ROOT / Path(*parts[:n]).with_suffix(".py")) for n in range(len(parts) - 1, 0, -1))
    n, path = next((n, path) for n, path in paths if path.exists())
    assert find(ast.parse(path.read_text()), ".".join(parts[n:])), contract.used


def texts(engine: str, modules: tuple[str, ...]) -> Iterator[tuple[str, ast.Constant]]:
    """Every text in our adapters' code that is no docstring."""
    for module in modules:
        tree = ast.parse((ROOT / "agent" / "engines" / f"{module}.py").read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                yield module, node


def listed(engine: str, kind: str) -> set[str]:
    return {c.what.split(" ")[-1] for c in CONTRACTS if c.package == engine and c.kind == kind}


@pytest.mark.parametrize("engine", ADAPTERS)
def test_no_adapter_calls_a_route_that_has_no_contract(engine: str) -> None:
    called = {n.value for _, n in texts(engine, ADAPTERS[engine]) if re.fullmatch(r"/[a-z0-9_/]{2,}", n.value)}
    held = listed(engine, "route") | listed(engine, "does")
    assert called
    assert called - held == set()


@pytest.mark.parametrize("engine", ADAPTERS)
def test_no_adapter_says_an_option_that_has_no_contract(engine: str) -> None:
    said = {n.value for _, n in texts(engine, ADAPTERS[engine]) if re.fullmatch(r"--?[a-zA-Z][a-z-]+", n.value)}
    held = listed(engine, "flag")
    assert len(said) > 10
    # Beginnings of options that are refused stand for all that begin so.
    assert {s for s in said - OURS if not any(flag.startswith(s) for flag in held)} == set()


@pytest.mark.parametrize("engine", ADAPTERS)
def test_no_adapter_sets_a_variable_of_the_engine_that_has_no_contract(engine: str) -> None:
    found = {n.value for _, n in texts(engine, ADAPTERS[engine]) if re.fullmatch(r"(VLLM|SGLANG)_[A-Z_]+", n.value)}
    assert found - listed(engine, "env") == set()


@pytest.mark.parametrize("engine", READS)
def test_no_adapter_sends_or_reads_a_field_that_has_no_contract(engine: str) -> None:
    held = {re.split(r"[.(\['\])]+", c.what.rstrip(")']"))[-1] for c in CONTRACTS if c.kind == "field"}
    held |= listed(engine, "does") | {"X-Request-Id", "Authorization"}
    used = set()
    for module in READS[engine]:
        for node in ast.walk(ast.parse((ROOT / "agent" / "engines" / f"{module}.py").read_text())):
            match node:
                case ast.Dict(keys=keys):
                    used |= {k.value for k in keys if isinstance(k, ast.Constant)}
                case ast.Subscript(slice=ast.Constant(value=str(key))):
                    used.add(key)
                case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key))]):
                    used.add(key)
                case ast.Call(func=ast.Attribute(attr="complete"), keywords=options):
                    used |= {o.arg for o in options if o.arg}
    assert len(used) > 10
    assert used - held == set()


def imports() -> set[tuple[str, str]]:
    """(module, name) of vLLM's that the part of Relight inside it imports, or preloads (then without a name)."""
    found = set()
    for path in sorted((ROOT / "plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "vllm":
                    found |= {(module, alias.name) for alias in names}
                case ast.Constant(value=str(text)) if re.fullmatch(r"vllm(\.\w+)+", text) and path.name == "preload.py":
                    found.add((text, ""))
    return found


def there(vllm: Source, module: str, name: str) -> bool:
    file = vllm.module(module)
    if file is None:
        return False
    return not name or bool(find(vllm.tree(file), name)) or vllm.module(f"{module}.{name}") is not None


@pytest.mark.parametrize("version", BOTH)
def test_whatever_the_plugin_imports_of_vllm_is_there_in_each_release(version: str, record_property: Record) -> None:
    vllm, lost = source("vllm", version), set()
    for module, name in imports():
        if module in EITHER.values():
            continue
        places = (module, EITHER.get(module, module))
        if not any(there(vllm, place, name) for place in places):
            lost.add(f"{module} {name}")
        record_property("contracts_checked", f"vllm import {module} {name} {version}")
    assert lost == set()


@pytest.fixture
def upgraded(tmp_path: Path) -> Source:
    """An engine whose next release moved everything."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("e/http.py", '@app.post("/rest", x=1)\ndef rest(tag: int) -> dict:\n    return {"state": 1}\n')
        file.writestr("e/args.py", 'class A:\n    enable_saver: bool = False\n\np.add_argument("--new", "-n")\n')
        file.writestr("e-1.dist-info/entry_points.txt", "[g]\nkun = a:b\n")
    return Source(tmp_path / "x.zip")


@pytest.mark.parametrize(
    ("kind", "kept", "moved"),
    [
        ("route", "POST /rest", "GET /rest"),
        ("route", "POST /rest", "POST /sleep"),
        ("flag", "--enable-saver", "--enable-memory-saver"),
        ("flag", "-n", "-m"),
        ("field", "rest(tag)", "rest(tags)"),
        ("field", "rest['state']", "rest['status']"),
        ("field", "A.enable_saver", "A.enable"),
        ("symbol", "A", "B"),
        ("env", "enable_saver", "SAVER"),
        ("does", "rest: state", "rest: assert"),
        ("does", "A: enable_saver", "gone: state"),
        ("lacks", "rest: headers", "rest: state"),
        ("entry", "g: kun", "g: kunlun"),
    ],
)
def test_an_upgrade_that_moves_something_breaks_its_contract(
    upgraded: Source, kind: str, kept: str, moved: str
) -> None:
    def said(what: str) -> str:
        return broken(Contract("e", ("1",), kind, what, "e/", "f"), upgraded)

    assert said(kept) == ""
    assert said(moved) != ""


def test_the_double_of_sglang_serves_what_sglang_does_and_closes_what_it_closes() -> None:
    real = source("sglang", "0.5.23")
    http, loads = (real.tree(f"sglang/srt/entrypoints/{name}.py") for name in ("http_server", "v1_loads"))
    served = {path for _, path in routes(http) | routes(loads)}
    closed = {
        path
        for node in ast.walk(http)
        if any("auth_level" in words(d) for d in getattr(node, "decorator_list", ()))
        for _, path in routes(ast.Module([node], []))  # type: ignore[list-item]
    }
    double = ast.parse((FOLDER / "double" / "sglang" / "http.py").read_text())
    doubled = {w for w in words(double) if re.fullmatch(r"/[a-z0-9_/]{2,}", w)}
    assert len(doubled) > 12
    assert doubled - served == set()
    said = find(double, "ADMIN")
    assert said is not None
    assert {w for w in words(said) if w.startswith("/")} == doubled & closed


def test_nothing_of_the_engines_lies_in_the_repository() -> None:
    assert ARCHIVES.resolve().is_relative_to(ROOT) is False
