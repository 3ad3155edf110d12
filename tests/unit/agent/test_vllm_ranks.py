"""What each rank of an engine is told of a rung, and what their answers are together."""

from __future__ import annotations

import pytest

from relight.agent.engines.vllm_ranks import offer, refill_arguments, refilled
from relight.core.errors import LocalFault
from relight.core.records import Deal, Rung, RungKind, SourceRef

DEAL = Deal("swarm", "a test", 2.0, 3, 1, 8)
FULL = SourceRef("i-a", "a", 1, "d0,d1", "c", "tcp:h:1,tcp:h:2", "grant", parts=(1, 4))
FILLING = SourceRef("i-b", "b", 2, "", "", "tcp:h:3,tcp:h:4", "other", filling=True, parts=(0, 2))


def test_rank_r_reads_the_same_parts_of_rank_r_of_each_holder() -> None:
    told = refill_arguments(Rung(RungKind.PEER_TCP, "", FULL, (FILLING,), deal=DEAL), "r1", "", 2, share=False)
    for rank, arguments in enumerate(told):
        full, filling = arguments["sources"]
        assert (full["address"], full["manifest_digest"]) == (f"tcp:h:{rank + 1}", f"d{rank}")
        assert (filling["address"], filling["manifest_digest"]) == (f"tcp:h:{rank + 3}", "")
        assert (full["parts"], filling["parts"], filling["filling"]) == ((1, 4), (0, 2), True)
        assert arguments["deal"]["parts"] == 8


def test_an_engine_is_told_of_dealing_only_where_something_is_dealt() -> None:
    plain = SourceRef("i-a", "a", 1, "", "", "tcp:h:1", "grant")
    (arguments,) = refill_arguments(Rung(RungKind.PEER_TCP, "", plain), "r1", "", 1, share=False)
    assert set(arguments["sources"][0]) == {
        "instance", "slot", "generation", "manifest_digest", "content_digest", "address", "grant",
    }  # fmt: skip
    assert arguments["deal"] is None


def test_a_holder_that_is_divided_otherwise_is_refused() -> None:
    with pytest.raises(LocalFault, match="addresses of 2 ranks, this engine has 1"):
        refill_arguments(Rung(RungKind.PEER_TCP, "", FULL), "r1", "", 1, share=False)


def test_bytes_of_all_ranks_are_counted_by_whom_they_came_from() -> None:
    said = [
        {"bytes": 10, "phases": [], "detail": "x", "brought": {"i-a": 4, "i-b": 6}},
        {"bytes": 7, "phases": [], "detail": "x", "brought": {"i-a": 7}},
    ]
    got = refilled(said)
    assert (got.bytes, got.brought) == (17, {"i-a": 11, "i-b": 6})
    # An engine that outlived an older agent does not say.
    assert refilled([{"bytes": 1, "phases": [], "detail": "x"}]).brought == {}


def test_a_relay_of_several_ranks_is_one_offer_with_their_bound_together() -> None:
    said = [
        {
            "generation": 3, "manifest_digest": "", "content_digest": "", "layout_digest": "l", "weight_bytes": 0,
            "addresses": {"tcp": f"tcp:h:{rank}"}, "closed": {},
        }
        for rank in range(2)
    ]  # fmt: skip
    found = offer(said, "ab" * 32, 200)
    assert (found.generation, found.addresses, found.rate_limit) == (3, {"tcp": "tcp:h:0,tcp:h:1"}, 200)
    assert "ab" not in repr(found)
