"""An engine whose versions do not match is not offered, and one that is told to be offered all the same is."""

from __future__ import annotations

from relight.agent.versions import check

FACTS = {"driver": "550.54.15", "memlock": "unlimited"}
BESIDE = {"vllm": {"vllm": "0.33.0", "torch": "2.13.0+cu130"}}


def test_an_engine_that_cannot_run_is_not_offered_and_the_reason_says_what_would_match() -> None:
    found = check("nvidia", {"vllm": "0.33.0", "stub": "1"}, BESIDE, FACTS, ())
    assert found.engines == {"stub": "1"}
    assert ">=580.65.06 would match" in found.facts["refused/vllm"]
    assert found.facts["vllm/torch"] == "2.13.0+cu130"
    assert found.facts["memlock"] == "unlimited"


def test_a_lock_that_is_ignored_is_noted_and_counts_no_more() -> None:
    found = check("nvidia", {"vllm": "0.33.0"}, BESIDE, FACTS, ("cuda-13-needs-driver-580",))
    assert found.engines == {"vllm": "0.33.0"}
    assert found.facts["ignored_locks"] == "cuda-13-needs-driver-580"
    assert "refused/vllm" not in found.facts


def test_locks_that_are_ignored_for_one_engine_stay_noted_beside_those_of_another() -> None:
    beside = {**BESIDE, "sglang": {"torch": "2.13.0+cu130", "torch-memory-saver": "0.0.8"}}
    ignored = ("cuda-13-needs-driver-580", "sglang-memory-saver")
    for engines in ({"vllm": "0.33.0", "sglang": "0.5.23"}, {"sglang": "0.5.23", "vllm": "0.33.0"}):
        assert check("nvidia", engines, beside, FACTS, ignored).facts["ignored_locks"] == ", ".join(ignored)


def test_what_is_only_to_be_said_is_offered_with_it() -> None:
    found = check("cpu", {"vllm": "0.33.0"}, {}, {}, ())
    assert found.engines == {"vllm": "0.33.0"}
    assert "vllm-on-cpu" in found.facts["mismatch/vllm"]
