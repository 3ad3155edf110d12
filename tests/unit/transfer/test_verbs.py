"""What of verbs needs no card: which address is taken, how long a peer may be silent, what a peer may say of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.transports.verbs import RETRIES, Gid, Peer, Region, choose_gid, gid_table, timeout_exponent

NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
PEER = Peer(qp=17, psn=3, gid=MAPPED, lid=0, mtu=5)
REGION = Region(address=1 << 47, bytes=64 << 20, rkey=536)


def test_the_address_over_ipv4_is_taken_before_any_other() -> None:
    table = [
        Gid(0, LOCAL, "IB/RoCE v1"),
        Gid(1, LOCAL, "RoCE v2"),
        Gid(2, MAPPED, "IB/RoCE v1"),
        Gid(3, MAPPED, "RoCE v2"),
    ]
    assert choose_gid(table).index == 3
    assert choose_gid(table[:3]).index == 1
    assert choose_gid(table[:1]).index == 0


def test_unused_entries_are_no_addresses() -> None:
    assert choose_gid([Gid(0, NONE, "RoCE v2"), Gid(1, LOCAL, "RoCE v2")]).index == 1
    with pytest.raises(LocalFault, match="no address"):
        choose_gid([Gid(0, NONE, "RoCE v2")])
    with pytest.raises(LocalFault, match="is the interface up"):
        choose_gid([])


def test_the_table_is_read_in_order_without_entries_that_have_no_type(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    for index in range(12):
        (port / "gids" / str(index)).write_text(f"{MAPPED}\n")
    for index in (2, 10):
        (port / "gid_attrs/types" / str(index)).write_text("RoCE v2\n")
    assert list(gid_table("mlx5_0", tmp_path)) == [Gid(2, MAPPED, "RoCE v2"), Gid(10, MAPPED, "RoCE v2")]
    assert list(gid_table("mlx5_9", tmp_path)) == []


def test_the_table_is_read_no_further_than_needed() -> None:
    table = iter([Gid(0, LOCAL, "RoCE v2"), Gid(1, MAPPED, "RoCE v2"), Gid(2, MAPPED, "RoCE v2")])
    assert choose_gid(table).index == 1
    assert next(table).index == 2


@pytest.mark.parametrize("seconds", [0.001, 0.5, 2.0, 4.0, 60.0])
def test_all_tries_together_take_as_long_as_was_asked_for_and_less_than_twice_that(seconds: float) -> None:
    taken = 4.096e-6 * 2 ** timeout_exponent(seconds) * (RETRIES + 1)
    assert seconds <= taken < 2 * seconds


def test_the_time_out_stays_within_what_verbs_know() -> None:
    # 0 would mean for ever.
    assert timeout_exponent(0.0) == 1
    assert timeout_exponent(1e9) == 31


def test_an_end_and_a_region_survive_the_wire() -> None:
    assert Peer.parse(json.loads(json.dumps(PEER.plain()))) == PEER
    assert Region.parse(json.loads(json.dumps(REGION.plain()))) == REGION


@pytest.mark.parametrize(
    "change",
    [
        {"qp": 1 << 24}, {"qp": -1}, {"qp": True}, {"qp": "17"}, {"psn": 1 << 24}, {"lid": 1 << 16}, {"mtu": 6},
        {"gid": 5}, {"gid": ""}, {"gid": "::::"}, {"gid": "10.0.0.1"}, {"gid": "g" * 8}, {"gid": "f" * 65},
        {"more": 1},
    ],
)  # fmt: skip
def test_an_end_that_says_something_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        Peer.parse({**PEER.plain(), **change})


@pytest.mark.parametrize("change", [{"rkey": 1 << 32}, {"rkey": -1}, {"address": 1 << 64}, {"bytes": 1.5}, {"more": 1}])
def test_a_region_that_says_something_else_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        Region.parse({**REGION.plain(), **change})


@pytest.mark.parametrize("raw", [None, [], "", {}, {"qp": 1}])
def test_what_is_no_end_at_all_is_refused(raw: object) -> None:
    with pytest.raises(InvalidInput, match="expected an RDMA end with qp, psn"):
        Peer.parse(raw)
    with pytest.raises(InvalidInput, match="expected an RDMA region with address"):
        Region.parse(raw)
