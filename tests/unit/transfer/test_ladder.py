"""Which transports come first between two members."""

from __future__ import annotations

import pytest

from relight.transfer.transports.ladder import Between, order


@pytest.mark.parametrize(
    ("between", "ways"),
    [
        (Between(same_host=True), ("shm", "tcp")),
        (Between(same_host=False), ("tcp",)),
        (Between(same_host=False, cards=True, nixl=True), ("rdma", "tcp")),
        (Between(True, "nvidia", linked=True), ("nvlink",)),
        (Between(True, "nvidia", linked=True, cards=True, nixl=True), ("nvlink", "nixl", "rdma")),
        (Between(False, "nvidia", linked=True, cards=True, nixl=True), ("nixl", "rdma")),
        (Between(False, "nvidia", cards=True), ("rdma",)),
        (Between(False, "kunlun", cards=True, nixl=True), ("rdma",)),
        (Between(True, "kunlun", linked=True), ()),
    ],
)
def test_the_fastest_way_that_is_there_comes_first(between: Between, ways: tuple[str, ...]) -> None:
    assert order(between) == ways
