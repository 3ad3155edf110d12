"""What people ask of the ring, and what a node does when other signers count."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cache import CPU_TREE, Nodes, a_key, sealed_tree

from relight.agent.cache.asking import answer
from relight.agent.cache.service import trusting
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Store
from relight.core.errors import InvalidInput, NotFound, Unavailable
from relight.core.records import CacheQuery


def _publish(nodes: Nodes, directory: Path, n: int = 0) -> str:
    with sealed_tree(directory / f"tree-{n}", nodes.signer, a_key(n)) as tree:
        nodes.ring().publish(tree)
        return tree.sealed.name


def test_a_list_names_each_key_once_with_its_model_and_all_its_nodes(nodes: Nodes, tmp_path: Path) -> None:
    names = {_publish(nodes, tmp_path, n) for n in range(2)}
    found = answer(nodes.ring(), CacheQuery("list"))
    assert {b.bundle for b in found.bundles} == names
    assert {b.model for b in found.bundles} == {"/models/m0", "/models/m1"}
    assert all(len(b.nodes) == 2 and b.last_use for b in found.bundles)
    assert not found.unheard


def test_a_node_that_does_not_answer_is_named_and_the_others_are_listed(nodes: Nodes, tmp_path: Path) -> None:
    _publish(nodes, tmp_path)
    ring = nodes.ring()
    nodes.kill("a", forget=False)
    found = answer(ring, CacheQuery("list"))
    assert list(found.unheard) == ["a"]
    assert len(found.bundles) == 1


def test_a_ring_that_does_not_answer_at_all_is_unavailable(nodes: Nodes) -> None:
    ring = nodes.ring()
    for name in list(nodes.nodes):
        nodes.kill(name, forget=False)
    with pytest.raises(Unavailable):
        answer(ring, CacheQuery("list"))


def test_one_key_is_shown_in_full_by_the_beginning_of_its_digest(nodes: Nodes, tmp_path: Path) -> None:
    name = _publish(nodes, tmp_path)
    found = answer(nodes.ring(), CacheQuery("show", a_key().digest[:6])).entry
    assert found is not None
    assert (found.key, found.bundle, found.files) == (a_key().digest, name, len(CPU_TREE))
    assert found.fields == a_key().fields
    assert found.signer == nodes.signer.name


@pytest.mark.parametrize(("key", "error"), [("ffffffff", NotFound), ("xyz", InvalidInput), ("ab", InvalidInput)])
def test_a_key_that_is_none_is_refused(nodes: Nodes, tmp_path: Path, key: str, error: type[Exception]) -> None:
    _publish(nodes, tmp_path)
    with pytest.raises(error):
        answer(nodes.ring(), CacheQuery("show", key))


def test_a_quarantine_is_listed_with_its_reason_and_ends_when_released(nodes: Nodes, tmp_path: Path) -> None:
    name = _publish(nodes, tmp_path)
    nodes.ring().quarantine(a_key(), name, "it did not load")
    (found,) = answer(nodes.ring(), CacheQuery("list")).bundles
    assert (found.quarantine, found.nodes) == ("it did not load", ())
    assert answer(nodes.ring(), CacheQuery("release", found.key)).nodes
    assert answer(nodes.ring(), CacheQuery("list")).bundles == ()
    with pytest.raises(NotFound):
        answer(nodes.ring(), CacheQuery("release", found.key))


def test_another_question_is_refused_with_those_that_there_are(nodes: Nodes) -> None:
    with pytest.raises(InvalidInput, match="list or show or release"):
        answer(nodes.ring(), CacheQuery("burn"))


def test_what_a_store_left_out_is_taken_in_once_its_signer_is_trusted_and_left_out_again(
    nodes: Nodes, tmp_path: Path
) -> None:
    name = _publish(nodes, tmp_path)
    keeper = nodes.holders(name)[0]
    stranger = Trust([Signer.new().public])
    store = Store(nodes.directory / keeper, stranger, nodes.clock, quota=1 << 30)
    assert store.used == (0, 0, 0)
    store.retrust(nodes.trust)
    assert [h.bundle for h in store.entries()] == [name]
    assert store.used == (1, sum(map(len, CPU_TREE.values())), 0)
    store.retrust(stranger)
    assert store.used == (0, 0, 0)
    store.retrust(nodes.trust)
    assert store.used[0] == 1


def test_a_name_that_is_no_key_costs_only_itself() -> None:
    good = Signer.new()
    assert trusting([Signer.new().public], ["nonsense", good.public]).keys >= Trust([good.public]).keys
