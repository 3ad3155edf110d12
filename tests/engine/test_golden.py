"""The golden check with a real vLLM: its numbers against float32, a swapped operator, and two engines' tensors."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import ENGINE_PYTHON, ROOT, Live, by_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


def golden(directory: Path, *words: str) -> tuple[int, dict[str, Any]]:
    env = {
        "PATH": os.environ["PATH"], "HOME": str(directory), "OMP_NUM_THREADS": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{Path(__file__).parent}",
    }  # fmt: skip
    argv = [str(ENGINE_PYTHON), "-m", "relight.plugin.golden", *words]
    done = subprocess.run(argv, env=env, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip(), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_is_as_close_to_the_reference_as_its_dtype_explains(
    tiny_model: Path, tmp_path: Path, dtype: str, record_property
) -> None:
    status, said = golden(tmp_path, "layers", str(tiny_model), "--dtype", dtype)
    record_property("errors", said)
    print(said)
    assert status == 0, said
    assert said["outside"] == ""
    assert set(said["errors"]) == {"embed", "layer 0", "layer 1", "norm", "logits"}
    assert max(said["errors"].values()) < said["tolerance"] / 2


def test_an_operator_that_was_swapped_is_found_at_its_first_layer(tiny_model: Path, tmp_path: Path) -> None:
    status, said = golden(tmp_path, "layers", str(tiny_model), "--with", "swapped_activation")
    print(said)
    assert status == 1
    assert said["outside"] == "layer 0"


def test_a_replica_has_its_sources_tensors_one_by_one(one: Live, tmp_path: Path) -> None:
    one.scaled(2)
    places = [next(one.state.glob(f"nodes/*/i/{i['id']}")) for i in by_state(one.instances(), "ready")]
    status, said = golden(tmp_path, "tensors", *map(str, places))
    assert status == 0, said
    assert said["tensors"] > 10
