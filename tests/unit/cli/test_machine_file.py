"""The machine's file: what is wrong is named by line and expectation, and nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.agent import config as agent_config
from relight.controller.cli import machine, up
from relight.controller.cli.home import Home
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput

GOOD = """\
engines:
  vllm: {python: python}
nodes:
  - name: node-a
    devices: [{id: cpu0, cores: [0], memory: 6GiB}]
  - name: node-b
    devices: [{id: cpu1, memory: 512MiB}]
models:
  - name: m
    uri: model
    revision: r1
    engine: vllm
    replicas: 1
    guardians: {replicas: 1, level: 2}
"""


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "python").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def writer(text: str) -> Path:
        path = tmp_path / "machine.yaml"
        path.write_text(text)
        return path

    return writer


def test_a_good_file_is_taken_with_paths_from_its_own_folder_and_sizes_in_bytes(write) -> None:
    path = write(GOOD)
    config = machine.load(path)
    assert config.models[0].uri == str(path.parent / "model")
    assert config.engines["vllm"].python == str(path.parent / "python")
    assert [n.devices[0].memory for n in config.nodes] == [6 << 30, 512 << 20]


def test_each_engine_that_an_agent_can_drive_may_be_a_models(write) -> None:
    text = GOOD.replace("vllm: {python", "sglang: {python").replace("engine: vllm", "engine: sglang")
    assert machine.load(write(text)).models[0].engine == "sglang"


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("name: node-a", "name: Node_A", 4, "lower-case"),
        ("memory: 6GiB", "memory: six", 5, "a size such as"),
        ("memory: 6GiB", "memory: -1", 5, "greater than 0"),
        ("cores: [0]", "cores: [-2]", 5, "greater than or equal to 0"),
        ("id: cpu0, ", "", 5, "Field required"),
        ("revision: r1", "revision: ''", 11, "at least 1 character"),
        ("replicas: 1\n    guardians", "replicas: -1\n    guardians", 13, "greater than or equal to 0"),
        ("replicas: 1\n    guardians", "replicas: one\n    guardians", 13, "a whole number"),
        ("level: 2", "level: 3", 14, "less than or equal to 2"),
        ("level: 2", "levl: 2", 14, "Extra inputs are not permitted"),
        ("engine: vllm", "engine: vllm\n    colour: red", 13, "Extra inputs are not permitted"),
        ("engine: vllm", "engine: sglang", 12, "one of the configured engines (vllm)"),
        ("vllm: {python", "trtllm: {python", 2, "an engine (vllm or sglang)"),
        ("uri: model", "uri: nowhere", 10, "a model directory with config.json"),
        ("python: python", "python: nowhere", 2, "an interpreter"),
        ("name: node-b", "name: node-a", 6, "a name of its own"),
        ("guardians: {replicas: 1", "guardians: {replicas: 9", 8, "at most 2 device(s)"),
        ("engine: vllm", "engine: vllm\n    mode: warp", 13, "'auto', 'guardian', 'lazy', 'normal' or 'cold'"),
        ("engine: vllm", "engine: vllm\n    rungs: [teleport]", 13, "peer_shm"),
        ("engines:", "ports: {controller: 7400, fleet: 7400}\nengines:", 1, "three different ports"),
        ("engines:", "hold: {seconds: 0}\nengines:", 1, "greater than 0"),
        ("engines:", "compile_cache: {quota: much}\nengines:", 1, "a size such as 512MiB"),
        ("engines:", "compile_cache: {trusted_keys: [me]}\nengines:", 1, "String should match pattern"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_expectation(write, old: str, new: str, line: int, expected: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(InvalidInput) as caught:
        machine.load(write(text))
    told = str(caught.value)
    assert f"line {line}" in told
    assert expected in told


def test_every_wrong_place_is_told_at_once(write) -> None:
    with pytest.raises(InvalidInput) as caught:
        machine.load(write(GOOD.replace("6GiB", "six").replace("level: 2", "level: 7")))
    assert len(caught.value.errors) == 2


@pytest.mark.parametrize(("share", "taken"), [(2, True), (1, False)])
def test_guardians_that_share_devices_need_fewer_of_them(write, share: int, taken: bool) -> None:
    path = write(GOOD.replace("guardians: {replicas: 1", f"guardians: {{max_per_device: {share}, replicas: 2"))
    if taken:
        assert machine.load(path).models[0].guardians.max_per_device == share
    else:
        with pytest.raises(InvalidInput, match=r"at most 2 device\(s\), 1 guardian"):
            machine.load(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "a mapping"), ("- a\n- b\n", "a mapping"), ("a: [1\n", "YAML"), ("nodes: {}\n", "engines"), ("\t", "YAML")],
)
def test_a_file_that_is_no_configuration_is_refused(write, text: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        machine.load(write(text))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.yaml"):
        machine.load(tmp_path / "none.yaml")


def test_the_shipped_example_fits_the_schema_of_the_file() -> None:
    import yaml

    example = Path(__file__).resolve().parents[3] / "examples" / "machine.yaml"
    machine.MachineConfig.model_validate(yaml.safe_load(example.read_text()))


def test_what_up_writes_of_the_compile_cache_is_what_agents_take(write, tmp_path: Path) -> None:
    key = "ab" * 32
    text = f"compile_cache: {{quota: 3GiB, archive: bundles, trusted_keys: [{key}]}}\n{GOOD}"
    home = Home(tmp_path / "home")
    home.create()
    files = {name: file for name, _, file in up._write(machine.load(write(text)), home, SystemClock())}
    found = agent_config.load(files["agent-node-a"]).cache_settings()
    assert found is not None
    assert (found.quota_bytes, found.archive, found.trusted_keys) == (3 << 30, tmp_path / "bundles", (key,))
    assert found.directory == tmp_path / "home" / "nodes" / "node-a" / "compile-cache"
    off = up._write(machine.load(write("compile_cache: {enabled: false}\n" + GOOD)), home, SystemClock())
    assert agent_config.load(off[1][2]).cache_settings() is None


def test_a_node_that_names_a_port_serves_its_metrics_there(write, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    text = GOOD.replace("  - name: node-b\n", "  - name: node-b\n    metrics_port: 9464\n")
    files = {name: file for name, _, file in up._write(machine.load(write(text)), home, SystemClock())}
    ports = [agent_config.load(files[f"agent-node-{n}"]).metrics_port for n in "ab"]
    assert ports == [None, 9464]
