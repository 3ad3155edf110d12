"""Late captures through vLLM's own classes, with the primitive that captures replaced: all of it but the GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import ENGINE_PYTHON, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
MODES = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
RUNNERS = ("v1", "v2")
WAYS = [f"{runner}/{mode}" for runner in RUNNERS for mode in MODES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("graphs_check.py")
    env = {
        "PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(tmp_path_factory.mktemp("home")), "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"),
    }  # fmt: skip
    done = subprocess.run(
        [str(ENGINE_PYTHON), str(script)], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("way", WAYS)
def test_the_graphs_of_a_lazy_start_are_in_the_end_those_of_a_normal_one(found, way: str) -> None:
    got = found["lazily"][way]
    assert got["equal"]
    assert got["steps_equal"]
    assert len(got["trace"]) == got["count"] == got["normal_count"] == got["whole"], "each was captured once"


@pytest.mark.parametrize("way", WAYS)
def test_a_lazy_start_captures_the_largest_of_each_mode_and_one_small_one(found, way: str) -> None:
    got = found["lazily"][way]
    modes = {mode for mode, _ in got["trace"]}
    assert got["first"] == len(modes) + 1
    largest = [[mode, max(n for m, n in got["trace"] if m == mode)] for mode in modes]
    assert all(graph in got["at_start"] for graph in largest)
    assert [n for _, n in got["at_start"]].count(1) == 1


@pytest.mark.parametrize("way", WAYS)
def test_steps_run_at_every_moment_and_ever_fewer_of_them_without_a_graph(found, way: str) -> None:
    """That no step captured, and none met an assertion, is asserted where they run."""
    got = found["lazily"][way]
    assert got["by_none"] == sorted(got["by_none"], reverse=True)
    assert got["by_none"][0] > got["by_none"][-1]
    assert got["padding"] <= 2.0


@pytest.mark.parametrize("way", WAYS)
def test_pieces_are_small_and_the_number_left_is_told(found, way: str) -> None:
    got = found["lazily"][way]
    assert max(got["late"]) <= 4
    assert got["lefts"] == [sum(got["late"][at:]) for at in range(len(got["late"]) + 1)]
    assert got["pieces_left"] == got["again"] == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_piece_that_fails_leaves_the_graphs_before_it_and_is_captured_by_the_next_call(found, runner: str) -> None:
    got = found["faults"][runner]
    assert got["said"][0] == "LocalFault: graphs were not captured: OutOfMemoryError: no memory for a graph"
    assert got["kept"]
    assert got["recovered"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_nothing_is_captured_asleep_or_within_a_step(found, runner: str) -> None:
    asleep, within = found["faults"][runner]["said"][1:3]
    assert asleep.startswith("Conflict: asleep")
    assert within.startswith("Conflict: a step is under way")


@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_whose_scratch_memory_moved_are_never_run_again(found, runner: str) -> None:
    got = found["faults"][runner]
    assert all("scratch memory moved" in said for said in got["said"][3:])
    assert got["void"] == ["NONE"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_two_ranks_capture_alike_and_one_that_fails_holds_the_other_back(found, runner: str) -> None:
    one, other = (rank[runner] for rank in found["ranks"])
    assert one["said"] == ["graphs were not captured: another rank failed"]
    assert other["said"] == ["graphs were not captured: OutOfMemoryError: no memory for a graph"]
    assert one["done"] == other["done"]
    assert one["graphs"] == other["graphs"]
    assert one["steps"] == other["steps"], "a step runs by the same graph on both, at every moment"
    assert one["steps"][1] == one["steps"][2], "the failed piece is not in use"


def test_an_engine_that_cannot_capture_late_captures_everything_at_its_start(found) -> None:
    assert found["obstacles"] == {"": 3, "strange": 17, "lora_config": 17, "kv_transfer_config": 17}


def test_memory_of_the_whole_set_is_kept_from_the_cache_even_where_vllm_was_told_not_to(found) -> None:
    kept = found["estimate"]
    assert kept["lazy/1"] == kept["lazy/0"] == kept["normal/1"] > 0
    assert kept["normal/0"] == 0
