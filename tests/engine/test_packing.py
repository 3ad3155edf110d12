"""Both ways of packing weights on the CPU, by the engine's own kernels: right results, weights that can change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.live import ENGINE_PYTHON, ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]
BF16_ERROR = 4e-3
"""Relative error that rounding the result to bf16 explains."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    script = Path(__file__).with_name("packing_check.py")
    home = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        [str(ENGINE_PYTHON), str(script)], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False,
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(home), "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_packed_weight_is_an_ordinary_tensor_whose_rows_can_be_read(found) -> None:
    if found["packing"] != "vnni32":
        assert found["handlers"] or found["packing"] == "plain"
        return
    assert found["same_shape"]
    assert found["rows_equal"]
    assert found["worst"]["packed"] <= BF16_ERROR


def test_handlers_compute_rightly_and_follow_the_weights_under_compiled_code(found) -> None:
    assert found["handlers"]
    assert found["worst"]["handlers"] <= BF16_ERROR
    assert found["compiled_before"] <= BF16_ERROR
    assert found["refused_while_dropped"]
    assert found["compiled_after"] <= BF16_ERROR
