"""A wrong agent configuration is refused with every wrong field named, and secrets are not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from relight.agent import config
from relight.agent.engines import registry, stub_settings
from relight.core.errors import InvalidInput

if TYPE_CHECKING:
    from relight.agent.surroundings import Surroundings

GOOD: dict[str, Any] = {
    "slot": "a",
    "controller_address": "127.0.0.1:7000",
    "token": "rlt_secret",
    "state_dir": "/var/lib/relight/a",
    "devices": [{"id": "cpu-0", "memory_bytes": 1024}],
    "engines": {"stub": {}},
}


def _load(tmp_path: Path, **changes: Any) -> config.AgentConfig:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return config.load(path)


def test_a_good_one_is_taken_with_its_defaults(tmp_path: Path) -> None:
    found = _load(tmp_path)
    assert found.socket == Path("/var/lib/relight/a/s/supervisor.sock")
    assert [d.id for d in found.wanted_devices().listed] == ["cpu-0"]


def test_the_compile_cache_is_on_below_the_state_directory_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    found = _load(tmp_path, bind_host="10.0.0.1").cache_settings()
    assert found is not None
    assert (found.directory, found.host) == (Path("/var/lib/relight/a/compile-cache"), "10.0.0.1")
    assert _load(tmp_path, compile_cache={"enabled": False}).cache_settings() is None


def test_a_node_without_engines_needs_no_devices(tmp_path: Path) -> None:
    assert _load(tmp_path, devices=[], engines={}).wanted_devices().listed == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"slot": "Not A Name"}, "slot"),
        ({"controller_address": "nowhere"}, "controller_address"),
        ({"state_dir": "relative"}, "state_dir"),
        ({"devices": []}, "(file)"),
        ({"token_file": "/run/token"}, "(file)"),
        ({"devices": [{"id": "x", "memory_bytes": 0}]}, "devices.0.memory_bytes"),
        ({"port": "80"}, "port"),
        ({"colour": "blue"}, "colour"),
        ({"token": 7}, "token"),
        ({"health_seconds": 0}, "health_seconds"),
        ({"compile_cache": {"quota_bytes": 0}}, "compile_cache.quota_bytes"),
        ({"compile_cache": {"host": "0.0.0.0"}}, "compile_cache.host"),
        ({"compile_cache": {"directory": "relative"}}, "compile_cache.directory"),
        ({"compile_cache": {"trusted_keys": ["ab"]}}, "compile_cache.trusted_keys.0"),
        ({"compile_cache": {"colour": "blue"}}, "compile_cache.colour"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _load(tmp_path, **changes)
    assert field in [e.field for e in caught.value.errors]


def test_a_secret_is_never_repeated(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        _load(tmp_path, token=["rlt_secret"])
    assert "rlt_secret" not in str(caught.value)
    assert "rlt_secret" not in repr(_load(tmp_path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('{"digests": "md5"}', "digests"),
        ('{"devices": [], "accelerators": {"kind": "abacus"}}', "accelerators.kind"),
        ('{"speed": 1}', "speed"),
        ("[1]", "expected an object of settings as JSON, got '[1]'"),
        ("{", "expected an object of settings as JSON"),
    ],
)
def test_settings_on_the_command_line_go_before_the_files_and_are_held_to_the_same(
    tmp_path: Path, settings: str, said: str
) -> None:
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(GOOD))
    ran = subprocess.run(
        [sys.executable, "-m", "relight.agent", "--config", str(path), "--settings", settings],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert said in ran.stderr


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        config.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InvalidInput, match="not a valid agent configuration"):
        config.load(tmp_path / "bad.json")


def test_unknown_engines_and_their_settings_are_refused_by_name() -> None:
    for engines, field in (({"warp": {}}, "engines.warp"), ({"stub": {"speed": 9}}, "engines.stub")):
        with pytest.raises(InvalidInput) as caught:
            registry.build(engines, (), cast("Surroundings", None))
        assert [e.field for e in caught.value.errors] == [field]


@pytest.mark.parametrize("arg", ["x", "=1", "token_delay=", 'token_delay="fast"', 'wake_errors={"disk": "sulk"}'])
def test_wrong_stub_arguments_are_refused(arg: str) -> None:
    with pytest.raises(InvalidInput):
        stub_settings.parse([arg])
