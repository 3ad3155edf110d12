"""The golden check's judgement: what is too far off, where it begins, and what cannot be compared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from relight.core.errors import InvalidInput
from relight.plugin.control import ControlServer
from relight.plugin.golden.judging import TOLERANCE, differing, judge

FINE = [("embed", 0.0), ("layer 0", 0.004), ("layer 1", 0.009), ("norm", 0.01), ("logits", 0.01)]


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_errors_within_the_dtypes_own_rounding_are_none(dtype: str) -> None:
    most = TOLERANCE[dtype]
    told = judge(dtype, [("embed", 0.0), ("layer 0", most / 2), ("logits", most)], same_token=True)
    assert told.outside == ""
    assert told.tolerance == most


def test_the_first_place_that_is_too_far_off_is_named() -> None:
    told = judge("bfloat16", [*FINE[:2], ("layer 1", 0.4), ("layer 2", 0.9)], same_token=False)
    assert told.outside == "layer 1"


def test_what_passes_in_bfloat16_does_not_in_float32() -> None:
    assert judge("bfloat16", FINE, same_token=True).outside == ""
    assert judge("float32", FINE, same_token=True).outside == "layer 0"


def test_not_a_number_is_no_small_error() -> None:
    assert judge("bfloat16", [("embed", math.nan)], same_token=False).outside == "embed"


@pytest.mark.parametrize(("dtype", "errors"), [("int4", FINE), ("bfloat16", [])])
def test_what_has_no_tolerance_or_no_layers_is_refused(dtype: str, errors: list[tuple[str, float]]) -> None:
    with pytest.raises(InvalidInput):
        judge(dtype, errors, same_token=True)


def test_tensors_that_differ_or_are_on_one_side_alone_are_named() -> None:
    assert differing({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == [
        "b: 2 here, 9 there", "c: here alone", "d: there alone",
    ]  # fmt: skip


def compared(ours: Path, theirs: Path) -> tuple[int, dict[str, object]]:
    argv = [sys.executable, "-m", "relight.plugin.golden", "tensors", str(ours), str(theirs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


def test_two_engines_are_compared_rank_by_rank_over_their_control_sockets(tmp_path: Path) -> None:
    servers = []
    for name, last in (("a", "2"), ("b", "2"), ("c", "9")):
        (tmp_path / name).mkdir()
        for rank in range(2):
            held = {"w": "1", "v": last if rank else "2"}
            path = tmp_path / name / f"worker-{rank}.sock"
            servers.append(ControlServer(path, {"digests": lambda arguments, progress, held=held: held}))
    try:
        assert compared(tmp_path / "a", tmp_path / "b") == (0, {"tensors": 4, "differing": [], "agree": True})
        status, said = compared(tmp_path / "a", tmp_path / "c")
        assert (status, said["differing"]) == (1, ["rank 1 v: 2 here, 9 there"])
        status, said = compared(tmp_path / "a", tmp_path)
        assert status == 2
        assert "no directory of a running engine" in str(said["error"])
    finally:
        for server in servers:
            server.close()
