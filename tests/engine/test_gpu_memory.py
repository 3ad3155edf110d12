"""Sleeps and wakes of an engine with its weights on a device, through vLLM's own sleep mode: all of it but the GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import ENGINE_PYTHON, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]
GRANULE = 1 << 20


def _checked(home: Path, *arguments: str, check: str = "gpu_memory_check") -> dict[str, Any]:
    script = Path(__file__).with_name(f"{check}.py")
    env = {
        "PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(home), "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }  # fmt: skip
    done = subprocess.run(
        [str(ENGINE_PYTHON), str(script), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=220,
        check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _checked(tmp_path_factory.mktemp("home"))


def test_every_way_in_which_a_model_holds_a_tensor_is_described_and_what_changes_is_not(found) -> None:
    names = {f"block.{name}" for name in (
        "wide", "column", "head", "table", "absorbed", "several.0", "several.1.inner", "kernel.scales", "tiny",
        "outside",
    )}  # fmt: skip
    assert (found["unfit"], found["state"]) == ("", "awake")
    assert set(found["tensors"]) == names
    assert found["aliases"] == ["block.tied"]
    assert found["left_out"] == ["block.counter"]
    assert found["weight_bytes"] > 700 * 1000 * 2
    assert found["kv"] == found["resident"]["kv_bytes"] == 4 * GRANULE


def test_a_sleep_takes_all_of_it_away_and_no_wake_comes_without_a_refill(found) -> None:
    asleep = found["asleep"]
    assert asleep == {"mapped": 0, "resident": {"weight_bytes": 0, "kv_bytes": 0, "host_copy_bytes": 0}}
    assert all("a refill must precede the wake" in said for said in found["no_refill"])
    assert "slept at level 2" in found["no_copy"]
    assert "is awake" in found["awake_refill"]


@pytest.mark.parametrize("rung", ["peer_nvlink", "peer_tcp", "disk", "host_copy"])
def test_every_rung_brings_the_same_bytes_to_the_same_places(found, rung: str) -> None:
    got = found["rungs"][rung]
    assert got["same"], "weights, buffers, memory that is nobody's, scalars, addresses, and all that was mapped"
    assert got["detail"].startswith(rung)
    assert got["phases"][0] == "map"


def test_a_running_peer_is_read_from_device_to_device_or_by_way_of_the_host(found) -> None:
    assert found["served"] == ["peer_nvlink", "peer_tcp"]
    assert "memory of device 0" in found["closed"]["shm"]


def test_vllms_copy_of_level_1_is_held_to_the_manifest_and_stays_until_a_wake_is_proven(found) -> None:
    assert found["level_1"]["host_copy_bytes"] >= GRANULE
    assert found["level_1"]["weight_bytes"] == 0
    assert found["after_copy"]["host_copy_bytes"] == 0
    assert "tensor block.wide from own host copy: digest" in found["altered_copy"]
    assert found["suspended"]["mapped"] == 0
    assert found["suspended"]["resident"]["host_copy_bytes"] == found["level_1"]["host_copy_bytes"]
    assert found["copy_again"]


def test_a_checkpoint_that_is_not_what_the_revision_was_is_refused_by_name(found) -> None:
    assert "tensor block." in found["wrong_checkpoint"]
    assert "had" in found["wrong_checkpoint"]
    assert found["right_checkpoint"]


def test_a_full_device_leaves_an_engine_asleep_that_can_be_woken_again(found) -> None:
    assert "did not bring the weights' memory back: RuntimeError: CUDA Error: out of memory" in found["full"]
    assert found["full_mapped"] == 0
    assert "out of memory" in found["full_cache"]
    assert found["full_state"] == "refilled"
    assert found["after_full"]


def test_a_neighbour_that_takes_memory_meanwhile_is_no_failed_sleep(found) -> None:
    assert found["neighbour"] == 0


def test_content_of_another_revision_replaces_all_of_it_and_is_served_on(found) -> None:
    assert "holds other content" in found["other_content"]
    assert all(found["new_content"])
    assert found["new_scale"] == 0.5
    assert found["new_revision"] == {"revision": "r2"}
    assert found["onward"] == ["nvlink", "tcp"]


def test_weights_are_discarded_by_a_sleep_alone(found) -> None:
    assert "given back by a sleep alone" in found["discard"]


def test_an_engine_with_adapters_neither_sleeps_nor_is_read_and_says_why(tmp_path: Path) -> None:
    got = _checked(tmp_path, "lora")
    assert "adapters lie in the memory" in got["unfit"]
    assert got["sleep"] == got["unfit"]
    assert got["served"] == []
    assert set(got["closed"].values()) == {got["unfit"]}
    assert got["weight_bytes"] > 700 * 1000 * 2


def test_memory_without_handles_is_served_by_way_of_the_host(tmp_path: Path) -> None:
    got = _checked(tmp_path, "no handles")
    assert got["served"] == ["tcp"]
    assert "without handles" in got["closed"]["nvlink"]
    assert got["sleep"] == ""


def test_a_real_models_tensors_are_described_in_place_and_vllms_own_reload_brings_them_back(
    tmp_path: Path, tiny_model: Path
) -> None:
    got = _checked(tmp_path, str(tiny_model), check="gpu_model_check")
    assert (got["unfit"], got["left_out"], got["missing"], got["failed"]) == ("", [], [], [])
    assert got["tensors"] > 20
    assert got["gone"], "weights were taken away before"
    assert got["same"], "and every digest agrees after"
    assert got["answers"]
    assert got["kernels"][0] == got["kernels"][1]
