"""Packed weights on the CPU, by the engine's own kernels: hidden memory is found, and can be changed."""

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


def test_the_hidden_memory_of_a_handler_is_found_and_is_the_weight(found) -> None:
    hidden = found["hidden"]
    assert hidden["found"]
    assert hidden["same_sizes"]
    assert not hidden["same_before"]
    assert hidden["same_after"]


def test_rebuilt_handlers_compute_rightly_and_follow_the_weights_under_compiled_code(found) -> None:
    rebuilt = found["rebuilt"]
    assert rebuilt["before"] <= BF16_ERROR
    assert rebuilt["refused_while_dropped"]
    assert rebuilt["after"] <= BF16_ERROR
