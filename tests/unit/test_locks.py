"""Versions that do not go together are named with what would match; what is not known is no mismatch."""

from __future__ import annotations

import pytest

from relight.core.errors import InvalidInput
from relight.core.locks import Lock, keeps, known, locks, mismatches

H100 = {"driver": "550.54.15", "torch": "2.13.0+cu130", "vllm": "0.33.0", "engine": "0.33.0"}
P800 = {"driver": "5.0.21.47", "runtime": "5.0.21", "firmware": "1.0:2.6:1.39.1.7", "vllm": "0.25.1"}


def test_a_driver_too_old_for_its_libraries_is_refused_with_the_one_that_would_do() -> None:
    (found,) = mismatches("nvidia", "vllm", H100)
    assert found.must == "refuse"
    assert str(found).startswith("cuda-13-needs-driver-580: driver is 550.54.15, and >=580.65.06 would match")
    assert mismatches("nvidia", "vllm", {**H100, "driver": "580.105.08"}) == ()
    assert mismatches("nvidia", "vllm", {**H100, "torch": "2.8.0+cu129"}) == ()


def test_a_plugin_of_another_engine_version_is_refused() -> None:
    (found,) = mismatches("kunlun", "vllm", {**P800, "vllm-kunlun": "0.15.1"})
    assert (found.what, found.got, found.expected) == ("vllm-kunlun", "0.15.1", "0.25.1, which vllm is,")
    assert mismatches("kunlun", "vllm", {**P800, "vllm-kunlun": "0.25.1.dev3"}) != ()
    assert mismatches("kunlun", "vllm", {**P800, "vllm-kunlun": "0.25.1"}) == ()


@pytest.mark.parametrize("missing", ["driver", "torch"])
def test_what_a_slot_does_not_tell_is_no_mismatch(missing: str) -> None:
    assert mismatches("nvidia", "vllm", {k: v for k, v in H100.items() if k != missing}) == ()


def test_a_lock_is_for_its_kind_and_engine_alone() -> None:
    assert mismatches("kunlun", "vllm", H100) != mismatches("nvidia", "vllm", H100)
    assert mismatches("cpu", "stub", {"vllm": "0.1"}) == ()
    assert [m.lock for m in mismatches("cpu", "vllm", {"vllm": "0.33.1+cpu"})] == ["vllm-on-cpu"]
    assert mismatches("cpu", "vllm", {"vllm": "0.32.0+cpu"}) == ()


@pytest.mark.parametrize(
    ("version", "wanted", "kept"),
    [
        ("580.65.06", ">=580.65.6", True),
        ("580", ">=580.0.0", True),
        ("0.32.0+cpu", "==0.32.0", True),
        ("0.320.0", "==0.32.*", False),
        ("1.9", ">=1.10", False),
        ("1.5", ">=1.2,<2", True),
        ("2.0", ">=1.2,<2", False),
        ("2.13.0+cu130", "*+cu13*", True),
        ("anything", "absent", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, kept: bool) -> None:
    assert keeps(version, wanted, {}) is kept


def test_every_lock_says_why_and_where_that_was_read() -> None:
    assert all(lock.why and lock.source and lock.needs and lock.must in ("refuse", "warn") for lock in locks())


def test_locks_of_ones_own_are_held_against_the_same_facts() -> None:
    own = Lock("mine", "warn", "because", "here", needs={"firmware": ">=1.0:2.7"})
    assert [m.lock for m in mismatches("kunlun", "x", P800, [own])] == ["mine"]


def test_a_name_that_is_no_locks_cannot_be_ignored() -> None:
    assert known(["vllm-on-cpu"]) == {"vllm-on-cpu"}
    with pytest.raises(InvalidInput, match="cuda-13-needs-driver-580"):
        known(["cuda"])
