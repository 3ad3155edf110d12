"""Who belongs to the compile-cache ring and what slots are told: pure, from snapshots."""

from __future__ import annotations

import pytest

from relight.controller.observe.ring import GRANT_SECONDS, KEPT_SIGNERS, Rings, nodes_of, remembered, signers_of, told
from relight.core.errors import Denied
from relight.core.records import CacheReport, SlotView, Snapshot
from relight.transfer.grants import check, new_key

NOW = 1_700_000_000.0


def node(n: int, **changes: object) -> CacheReport:
    values = {"address": f"tcp:10.0.0.{n}:7", "signer": f"{n:064x}", "grant_key": f"{n:02x}" * 32}
    return CacheReport(**{**values, **changes})  # type: ignore[arg-type]


def slot(name: str, cache: CacheReport | None, alive: bool = True, signers: tuple[str, ...] = ()) -> SlotView:
    return SlotView(name, alive, "boot", False, {}, (), cache=cache, signers=remembered(cache, signers))


def seen(*slots: SlotView, synced: bool = True) -> Snapshot:
    return Snapshot(NOW, 1, 1, (), slots, (), synced)


def test_members_are_the_nodes_of_living_slots() -> None:
    found = nodes_of(seen(slot("a", node(1)), slot("b", None), slot("c", node(3), alive=False)))
    assert list(found) == ["a"]


def test_signers_outlive_their_slots_and_nobody_elses_key_is_among_them() -> None:
    gone = SlotView("c", False, "", False, {}, (), signers=("c" * 64,))
    assert signers_of(seen(slot("a", node(1)), gone)) == tuple(sorted([f"{1:064x}", "c" * 64]))


def test_of_a_slot_that_has_new_keys_again_and_again_the_newest_are_remembered() -> None:
    kept: tuple[str, ...] = ()
    for n in range(10):
        kept = remembered(node(n), kept)
    assert kept == tuple(f"{n:064x}" for n in (9, 8, 7, 6))
    assert len(kept) == KEPT_SIGNERS
    assert remembered(node(8), kept)[0] == f"{8:064x}"
    assert remembered(None, kept) == kept


def test_each_receiver_has_grants_of_its_own_that_the_nodes_accept() -> None:
    rings = Rings()
    keys = {"a": new_key(), "b": new_key()}
    rings.update(1, seen(*(slot(name, node(n, grant_key=keys[name])) for n, name in enumerate(keys))))
    assert rings.of() is not None
    ring = told(rings.of(), "a", NOW)
    for found in ring.nodes:
        claims = check(
            keys[found.slot], found.grant, now=NOW + GRANT_SECONDS, source_instance=found.slot, generation=0,
            manifest_digest=str,
        )  # fmt: skip
        assert claims.receiver == "a"
        assert keys[found.slot] not in repr(ring)
        assert found.grant not in repr(ring)
    late = NOW + 2 * GRANT_SECONDS
    with pytest.raises(Denied):
        check(keys["a"], ring.nodes[0].grant, now=late, source_instance="a", generation=0, manifest_digest=str)


def test_what_is_told_stays_equal_until_grants_are_due() -> None:
    rings = Rings()
    rings.update(1, seen(slot("a", node(1))))
    assert rings.of() is not None
    begun = NOW - NOW % GRANT_SECONDS
    first = told(rings.of(), "a", begun)
    assert told(rings.of(), "a", begun + GRANT_SECONDS - 1) == first
    assert told(rings.of(), "a", begun + GRANT_SECONDS) != first


def test_a_node_whose_key_is_no_key_is_named_without_a_grant() -> None:
    rings = Rings()
    rings.update(1, seen(slot("a", node(1, grant_key="nonsense")), slot("b", node(2))))
    assert rings.of() is not None
    assert [bool(n.grant) for n in told(rings.of(), "b", NOW).nodes] == [False, True]


def test_the_revision_grows_when_somebody_would_be_told_something_else_and_only_then() -> None:
    rings, heard = Rings(), []
    rings.listen(lambda: heard.append(rings.of()))
    rings.update(1, seen(slot("a", node(1))))
    rings.update(1, seen(slot("a", node(1, bytes=77, hits=3))))
    assert len(heard) == 1
    rings.update(1, seen(slot("a", node(1)), slot("b", node(2))))
    rings.update(1, seen(slot("a", node(1, address="tcp:10.0.0.9:7")), slot("b", node(2))))
    rings.update(2, seen(slot("a", node(1, address="tcp:10.0.0.9:7")), slot("b", node(2))))
    revisions = [members.revision for members in heard if members]
    assert revisions == sorted(set(revisions))
    assert len(revisions) == 4
    assert revisions[-1] >> 32 == 2


def test_a_controller_that_has_not_heard_of_everybody_says_nothing_of_the_ring() -> None:
    rings = Rings()
    rings.update(1, seen(slot("a", node(1)), synced=False))
    assert rings.of() is None
