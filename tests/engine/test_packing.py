"""The ways of packing weights on the CPU, by the engine's own kernels: right results, weights that can change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.live import ENGINE_PYTHON, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
BF16_ERROR = 4e-3
"""Relative error that rounding the result to bf16 explains."""


# oneDNN packs differently for each instruction set; an older one can be asked of a newer CPU.
SETS = [s for s in ("amx_bf16", "avx512_bf16") if s in Path("/proc/cpuinfo").read_text().split()]


@pytest.fixture(scope="module", params=SETS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("packing_check.py")
    env = {
        "PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(tmp_path_factory.mktemp("home")), "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if request.param == "avx512_bf16":
        env["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    done = subprocess.run(
        [str(ENGINE_PYTHON), str(script)], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_this_cpu_has_an_instruction_set_whose_packing_is_known() -> None:
    assert SETS, "weights of this CPU are packed apart: a wake takes longer (docs/adr/0002)"


def test_a_handler_inside_a_segment_computes_vllms_very_numbers_from_what_the_segment_holds(found) -> None:
    assert found["slots"]
    assert found["in_place"]["equal"]
    assert found["in_place"]["follows"]


def test_a_packed_weight_is_an_ordinary_tensor_whose_rows_can_be_read(found) -> None:
    assert "None" not in found["in_place"]["rows"]
    assert found["in_place"]["rows_readable"]


def test_compiled_code_rounds_a_packed_embedding_where_it_rounds_a_plain_one(found) -> None:
    assert found["compiled_as_plain"]


def test_a_weight_that_cannot_be_packed_in_place_is_left_as_it_was(found) -> None:
    assert found["refusals"]["refused"]
    assert found["refusals"]["unchanged"]


def test_other_threads_allocate_as_ever_while_handlers_are_made(found) -> None:
    assert found["refusals"]["others_left_alone"]
    assert found["refusals"]["slots_restored"]


def test_handlers_apart_compute_rightly_and_follow_the_weights_under_compiled_code(found) -> None:
    apart = found["apart"]
    assert apart["worst"] <= BF16_ERROR
    assert apart["before"] <= BF16_ERROR
    assert apart["refused_while_dropped"]
    assert apart["after"] <= BF16_ERROR


def test_an_engine_without_weights_is_packed_as_one_with_them_and_computes_from_what_it_is_given(found) -> None:
    assert found["empty"] == {"same": True, "computes": True}
