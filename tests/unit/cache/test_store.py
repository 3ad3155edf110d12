"""A node's disk: whole bundles or none, a quota, the least recently used go first, quarantine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relight.agent.cache.bundle import Limits
from relight.agent.cache.sealing import SealedTree
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Quarantine, Store
from relight.core.clock import VirtualClock
from relight.core.errors import Conflict, Denied, InvalidInput, NotFound, Unavailable
from tests.support.cache import a_key, sealed_tree

SIGNER = Signer.new()
TRUST = Trust([SIGNER.public])
SIZE = 1000


class Disk:
    """A store and its clock; bundles of SIZE bytes are put by number."""

    def __init__(self, root: Path, quota: int = 1 << 30) -> None:
        self.root, self.quota, self.clock = root, quota, VirtualClock()
        self.store = self.opened()

    def opened(self, trust: Trust = TRUST) -> Store:
        self.store = Store(self.root / "store", trust, self.clock, quota=self.quota)
        return self.store

    def put(self, n: int, content: bytes = b"x", last_use: float | None = None) -> str:
        self.clock.advance(10)
        with sealed_tree(self.root, SIGNER, a_key(n), {"triton/a": content * SIZE}) as tree:
            return self.take(tree, last_use)

    def take(self, tree: SealedTree, last_use: float | None = None) -> str:
        incoming = self.store.receive(tree.sealed, last_use)
        if incoming is not None:
            with incoming:
                incoming.chunk(tree.body.read_bytes())
                incoming.commit()
        return tree.sealed.name

    def held(self) -> set[str]:
        return {h.bundle for h in self.store.entries()}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_what_was_put_is_found_by_its_key_also_by_the_next_process(disk: Disk) -> None:
    name = disk.put(1)
    used = disk.store.find(a_key(1).digest)
    assert used is not None
    assert used.bundle == name
    again = disk.opened().find(a_key(1).digest)
    assert again == used
    assert disk.store.body(name).read_bytes() == b"x" * SIZE
    assert disk.store.find(a_key(2).digest) is None


def test_bundles_never_change(disk: Disk) -> None:
    disk.put(1)
    disk.put(1)
    with pytest.raises(Conflict, match="never change"):
        disk.put(1, b"y")


def test_the_least_recently_used_goes_for_a_new_one(tmp_path: Path) -> None:
    disk = Disk(tmp_path, quota=3 * SIZE)
    names = [disk.put(n) for n in range(3)]
    disk.clock.advance(10)
    disk.store.touch(names[0])
    fourth = disk.put(3)
    assert disk.held() == {names[0], names[2], fourth}
    assert disk.opened()
    assert disk.held() == {names[0], names[2], fourth}


def test_an_old_bundle_does_not_push_out_a_newer_one(tmp_path: Path) -> None:
    disk = Disk(tmp_path, quota=2 * SIZE)
    names = {disk.put(n) for n in range(2)}
    with pytest.raises(Unavailable, match="more recently"):
        disk.put(2, last_use=1.0)
    assert disk.held() == names


def test_what_is_larger_than_the_quota_is_refused_and_nothing_goes_for_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path, quota=2 * SIZE)
    names = {disk.put(n) for n in range(2)}
    with (
        pytest.raises(Unavailable, match="quota"),
        sealed_tree(tmp_path, SIGNER, a_key(9), {"triton/a": bytes(3 * SIZE)}) as tree,
    ):
        disk.take(tree)
    assert disk.held() == names


def test_two_on_their_way_in_do_not_take_the_same_room(tmp_path: Path) -> None:
    disk = Disk(tmp_path, quota=SIZE + SIZE // 2)
    with sealed_tree(tmp_path / "first", SIGNER, a_key(1), {"triton/a": b"x" * SIZE}) as tree:
        first = disk.store.receive(tree.sealed)
        assert first is not None
        with first, pytest.raises(Unavailable, match="quota"):
            disk.put(2)
        assert disk.take(tree)


def test_what_is_too_large_or_unsigned_or_of_a_stranger_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", TRUST, VirtualClock(), quota=1 << 30, limits=Limits(body_bytes=10))
    with sealed_tree(tmp_path, SIGNER) as tree, pytest.raises(InvalidInput, match="too large"):
        store.receive(tree.sealed)
    with sealed_tree(tmp_path, Signer.new()) as tree, pytest.raises(Denied, match="not trusted"):
        store.receive(tree.sealed)
    assert not list((tmp_path / "s" / "bundles").iterdir())


def test_nothing_is_left_of_an_unfinished_bundle(disk: Disk) -> None:
    with sealed_tree(disk.root, SIGNER) as tree:
        incoming = disk.store.receive(tree.sealed)
        assert incoming is not None
        with incoming, pytest.raises(InvalidInput, match="0 of 1 chunks"):
            incoming.commit()
    (disk.root / "store" / "incoming" / "of-a-killed-process").mkdir()
    assert not disk.opened().entries()
    assert not list((disk.root / "store" / "incoming").iterdir())


def test_a_damaged_bundle_is_left_out_at_the_start_and_takes_its_place_again(disk: Disk) -> None:
    name = disk.put(1)
    os.truncate(disk.root / "store" / "bundles" / name / "body", 5)
    assert not disk.opened().entries()
    assert disk.put(1) == name
    assert disk.held() == {name}
    assert disk.opened().find(a_key(1).digest)


def test_what_a_retired_key_signed_is_not_given_out_any_more(disk: Disk) -> None:
    disk.put(1)
    assert not disk.opened(Trust([Signer.new().public])).entries()


def test_a_rotten_body_is_given_up_when_somebody_doubts_it(disk: Disk) -> None:
    name, good = disk.put(1), disk.put(2)
    body = disk.root / "store" / "bundles" / name / "body"
    body.write_bytes(b"y" * SIZE)
    assert not disk.store.doubt(name)
    assert disk.store.doubt(good)
    assert disk.held() == {good}


def test_a_quarantined_key_is_given_to_nobody_and_takes_no_other_bundle_until_it_is_released(disk: Disk) -> None:
    name, key = disk.put(1), a_key(1).digest
    disk.store.quarantine(Quarantine(key, name, "segmentation fault", 1.0))
    for _ in range(2):
        assert disk.store.find(key) is None
        found = disk.store.quarantined(key)
        assert found is not None
        assert found.reason == "segmentation fault"
        with pytest.raises(NotFound):
            disk.store.sealed(name)
        with pytest.raises(Conflict, match="quarantine: segmentation fault"):
            disk.put(1, b"y")
        disk.opened()
    assert disk.store.release(key)
    assert not disk.store.release(key)
    assert disk.put(1, b"y") != name


def test_a_damaged_quarantine_is_a_quarantine_all_the_same(disk: Disk) -> None:
    key = a_key(1).digest
    disk.store.quarantine(Quarantine(key, "", "why", 1.0))
    (disk.root / "store" / "quarantine" / key).write_text("{")
    assert disk.opened().quarantined(key)


def test_a_body_being_read_can_be_read_to_its_end_while_it_is_collected(disk: Disk) -> None:
    name = disk.put(1)
    with disk.store.open_body(name) as body:
        disk.store.drop(name)
        assert body.read() == b"x" * SIZE
    with pytest.raises(NotFound):
        disk.store.open_body(name)
