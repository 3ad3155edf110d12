"""The ring over sockets: found, fetched and repaired while nodes come, go, lie and forget."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.cache import CPU_TREE, GRANT_KEY, Nodes, a_key, contents, sealed_tree

from relight.agent.cache import bundle, messages
from relight.agent.cache import node as node_module
from relight.agent.cache.install import install
from relight.agent.cache.node import CacheNode
from relight.agent.cache.peer import Peer
from relight.agent.cache.placement import Membership
from relight.agent.cache.ring import Absent, Claim, Present, Ring
from relight.agent.cache.signing import Signer
from relight.agent.cache.store import Store
from relight.controller.cli import pki
from relight.core.clock import SystemClock
from relight.core.errors import Conflict, Denied, InvalidInput, RemoteFault, Unavailable
from relight.core.tls import TlsFiles
from relight.transfer import grants
from relight.transfer.transports import wire

LARGE = {"triton/a": bytes(range(256)) * (3 * bundle.CHUNK_BYTES // 256), "triton/b": b"end"}


def put(nodes: Nodes, n: int = 0, files=CPU_TREE) -> str:
    with sealed_tree(nodes.directory, nodes.signer, a_key(n), files) as tree:
        nodes.ring().publish(tree)
        return tree.sealed.name


def got(nodes: Nodes, ring: Ring, n: int = 0) -> dict[str, bytes]:
    found = ring.find(a_key(n))
    assert isinstance(found, Present), found
    root = nodes.directory / "installed"
    with ring.open(found, a_key(n)) as remote:
        install(remote, root)
    there = contents(root)
    root.rename(nodes.directory / f"done-{threading.get_ident()}-{len(list(nodes.directory.iterdir()))}")
    return there


def test_a_bundle_is_kept_by_its_keepers_and_comes_back_whole(nodes: Nodes) -> None:
    name = put(nodes, files=LARGE)
    assert nodes.holders(name) == sorted(nodes.members.keepers(a_key().digest))
    assert got(nodes, nodes.ring()) == LARGE


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_whichever_node_dies_the_bundle_is_found_and_repaired(nodes: Nodes, lost: str) -> None:
    names = [put(nodes, n) for n in range(6)]
    ring = nodes.ring()
    nodes.kill(lost, forget=False)
    for n in range(6):
        assert got(nodes, ring, n) == dict(CPU_TREE)
    nodes.tell()
    nodes.repair()
    assert all(len(nodes.holders(name)) == 2 for name in names)


def test_who_joins_takes_over_what_it_shall_keep_and_the_surplus_goes(nodes: Nodes) -> None:
    names = {n: put(nodes, n) for n in range(20)}
    nodes.start("d")
    for n in names:
        assert got(nodes, nodes.ring(), n) == dict(CPU_TREE)
    nodes.repair()
    nodes.repair()
    for n, name in names.items():
        assert nodes.holders(name) == sorted(nodes.members.keepers(a_key(n).digest))
    assert any("d" in nodes.holders(name) for name in names.values())


def test_a_node_that_was_away_is_brought_up_to_date(nodes: Nodes) -> None:
    nodes.kill("a")
    names = [put(nodes, n) for n in range(6)]
    nodes.start("a")
    nodes.repair()
    nodes.repair()
    for n, name in enumerate(names):
        assert nodes.holders(name) == sorted(nodes.members.keepers(a_key(n).digest))


def test_nothing_is_given_up_while_a_node_goes_by_other_members(nodes: Nodes) -> None:
    names = [put(nodes, n) for n in range(10)]
    nodes.start("d")
    before = {name: nodes.holders(name) for name in names}
    for other in "bcd":
        # As if it had not heard yet of this revision.
        nodes.nodes[other]._members = Membership(nodes.revision - 1, nodes.members.nodes)
    nodes.nodes["a"].repair(nodes.grant)
    for name in names:
        assert set(before[name]) <= set(nodes.holders(name))


def test_a_reader_goes_on_with_the_next_holder_where_one_died(nodes: Nodes) -> None:
    put(nodes, files=LARGE)
    ring = nodes.ring()
    found = ring.find(a_key())
    assert isinstance(found, Present)
    with ring.open(found, a_key()) as remote:
        chunks = remote.chunks()
        first = bytes(next(chunks))
        nodes.kill(remote.gave[0], forget=False)
        rest = b"".join(bytes(c) for c in chunks)
        assert first + rest == b"".join(LARGE.values())
        assert len(remote.gave) == 2
        assert remote.gave[0] in remote.faults[0]


def test_a_node_whose_disk_rots_is_found_out_and_repaired(nodes: Nodes) -> None:
    name = put(nodes, files=LARGE)
    first = nodes.ring().find(a_key())
    assert isinstance(first, Present)
    body = nodes.stores[first.nodes[0]].body(name)
    body.write_bytes(bytes(body.stat().st_size))
    assert got(nodes, nodes.ring()) == LARGE
    assert len(nodes.holders(name)) == 1
    nodes.repair()
    assert len(nodes.holders(name)) == 2
    assert got(nodes, nodes.ring()) == LARGE


def test_with_no_node_left_the_answer_is_absent_with_the_reason(nodes: Nodes) -> None:
    ring = nodes.ring()
    for name in list(nodes.nodes):
        nodes.kill(name, forget=False)
    found = ring.obtain(a_key(), 5.0)
    assert isinstance(found, Absent)
    assert found.reason.startswith("no cache node answers")


def test_a_publication_goes_to_the_next_best_when_a_keeper_is_gone(nodes: Nodes) -> None:
    ring = nodes.ring()
    gone = nodes.members.keepers(a_key().digest)[0]
    nodes.kill(gone, forget=False)
    with sealed_tree(nodes.directory, nodes.signer) as tree:
        done = ring.publish(tree)
    assert len(done.nodes) == 2
    assert gone in done.refused[0]


def test_a_bundle_of_a_stranger_is_taken_by_nobody(nodes: Nodes) -> None:
    with sealed_tree(nodes.directory, Signer.new(), a_key(), LARGE) as tree, pytest.raises(Denied, match="not trusted"):
        nodes.ring().publish(tree)
    assert isinstance(nodes.ring().find(a_key()), Absent)


def test_a_body_altered_on_the_way_is_refused_by_the_node_and_leaves_nothing(nodes: Nodes) -> None:
    with sealed_tree(nodes.directory, nodes.signer, a_key(), LARGE) as tree:
        tree.body.write_bytes(bytes(tree.manifest.body_bytes))
        with pytest.raises(Denied, match="chunk 0"):
            nodes.ring().publish(tree)
    for name in nodes.nodes:
        assert not nodes.stores[name].entries()
        assert not list((nodes.directory / name / "incoming").iterdir())


def test_a_second_bundle_of_a_key_is_a_conflict(nodes: Nodes) -> None:
    put(nodes)
    with pytest.raises(Conflict, match="never change"):
        put(nodes, files={"triton/other": b"1"})


def test_two_bundles_of_one_key_from_two_sides_of_a_partition_end_as_one(nodes: Nodes) -> None:
    first, second = nodes.members.keepers(a_key().digest)
    members = nodes.members
    names = []
    for node, files in ((first, CPU_TREE), (second, {"triton/other": b"1"})):
        ring = nodes.ring()
        ring.members = Membership(members.revision, {node: members.nodes[node]})
        with sealed_tree(nodes.directory, nodes.signer, a_key(), files) as tree:
            ring.publish(tree)
            names.append(tree.sealed.name)
    nodes.repair()
    assert nodes.holders(min(names)) == sorted((first, second))
    assert nodes.holders(max(names)) == []


# ---------------------------------------------------------------------- one compile


def test_of_many_that_start_at_once_one_compiles_and_the_rest_get_its_bundle(nodes: Nodes) -> None:
    begun = threading.Barrier(20)
    compiled = []

    def start(n: int) -> str:
        ring = nodes.ring(f"engine-{n}")
        begun.wait(10)
        found = ring.obtain(a_key(), 60.0)
        if isinstance(found, Claim):
            compiled.append(n)
            with sealed_tree(nodes.directory / f"e{n}", nodes.signer) as tree:
                ring.publish(tree)
            found.release()
            return "compiled"
        assert isinstance(found, Present), found
        return "waited" if found.waited else "at once"

    with ThreadPoolExecutor(20) as pool:
        said = list(pool.map(start, range(20)))
    assert said.count("compiled") == len(compiled) == 1


def test_the_one_who_compiles_is_known_also_when_the_keys_first_node_dies(nodes: Nodes) -> None:
    claim = nodes.ring("first").obtain(a_key(), 1.0)
    assert isinstance(claim, Claim)
    nodes.kill(nodes.members.keepers(a_key().digest)[0], forget=False)
    found = nodes.ring("second").obtain(a_key(), 0.2)
    assert isinstance(found, Absent)
    assert "first has been compiling" in found.reason
    claim.release()
    assert isinstance(nodes.ring("second").obtain(a_key(), 0.2), Claim)


def test_when_the_one_who_compiles_dies_the_next_takes_over(nodes: Nodes) -> None:
    dead = nodes.ring("dead", lease_seconds=0.5)
    claim = dead.obtain(a_key(), 1.0)
    assert isinstance(claim, Claim)
    # Its process ends without a word: nobody renews.
    claim.ended.set()
    found = nodes.ring("next").obtain(a_key(), 30.0)
    assert isinstance(found, Claim)
    assert found.waited > 0
    found.release()


def test_a_living_holder_keeps_its_lease_however_long_it_compiles(nodes: Nodes) -> None:
    claim = nodes.ring("slow", lease_seconds=0.6).obtain(a_key(), 1.0)
    assert isinstance(claim, Claim)
    found = nodes.ring("other").obtain(a_key(), 2.0)
    assert isinstance(found, Absent)
    claim.release()


def test_a_claim_says_what_changed_against_the_nearest_key(nodes: Nodes) -> None:
    put(nodes, 1)
    claim = nodes.ring().obtain(a_key(2), 1.0)
    assert isinstance(claim, Claim)
    assert [str(d) for d in claim.why.changed] == ["model: '/models/m2' here, '/models/m1' there"]
    claim.release()


def test_a_quarantined_key_is_compiled_by_each_for_itself_until_it_is_released(nodes: Nodes) -> None:
    name = put(nodes)
    ring = nodes.ring()
    nodes.kill("a")
    assert ring.quarantine(a_key(), name, "segmentation fault") == ["b", "c"]
    nodes.start("a")
    nodes.repair()
    assert nodes.stores["a"].quarantined(a_key().digest)
    ring = nodes.ring()
    found = ring.obtain(a_key(), 1.0)
    assert isinstance(found, Absent)
    assert found.quarantined
    assert "segmentation fault" in found.reason
    with pytest.raises(Conflict, match="quarantine"):
        put(nodes)
    assert sorted(ring.release(a_key().digest)) == ["a", "b", "c"]
    assert put(nodes)


# ---------------------------------------------------------------------- bad peers


def _raw(nodes: Nodes, *messages_: object) -> socket.socket:
    host, port = wire.parse_endpoint(nodes.members.nodes["a"], "tcp")
    sock = socket.create_connection((host, port), 10)
    for message in messages_:
        wire.send_frame(sock, message if isinstance(message, bytes) else json.dumps(message).encode())
    return sock


@pytest.mark.parametrize(
    ("grant", "why"),
    [
        (grants.mint(grants.new_key(), grants.Claims("a", 0, "", "x", 9e9)), "not signed"),
        (grants.mint(GRANT_KEY, grants.Claims("b", 0, "", "x", 9e9)), "grant is for b"),
        (grants.mint(GRANT_KEY, grants.Claims("a", 0, "", "x", 1.0)), "expired"),
        ("", "form payload.signature|not signed"),
    ],
)
def test_without_a_good_grant_a_node_answers_nothing(grant: str, why: str, nodes: Nodes) -> None:
    with pytest.raises(Denied, match=why):
        Peer("a", nodes.members.nodes["a"], grant, 5.0)


def test_what_is_no_request_is_refused_and_the_node_serves_on(nodes: Nodes) -> None:
    hello = {"version": messages.VERSION, "grant": nodes.grant("a")}
    for said in (
        (b"\xff\xfe",), ({"version": 9, "grant": "x"},), ([],), (hello, {"op": "unpickle"}), (hello, {"op": "find"}),
        (hello, {"op": "find", "key": "../../etc/passwd"}), (hello, {"op": "sealed", "bundle": "../x", "use": True}),
        (hello, {"op": "read", "bundle": "0" * 64, "offset": -1, "length": 1}), (hello, {"op": "wait"}),
        (hello, {"op": "acquire", "key": "0" * 32, "holder": "h", "token": "t", "seconds": float("inf")}),
        (hello, {"op": "nearest", "fields": {"a": 1}}), (hello, b"[" * 100_000),
    ):  # fmt: skip
        with _raw(nodes, *said) as sock:
            if len(said) > 1:
                messages.reply(sock, "a")
            with pytest.raises((InvalidInput, Denied)):
                messages.reply(sock, "a")
    # A frame that claims to be huge is refused before it is read.
    host, port = wire.parse_endpoint(nodes.members.nodes["a"], "tcp")
    with socket.create_connection((host, port), 10) as sock:
        sock.sendall((1 << 31).to_bytes(4, "big"))
        with pytest.raises(InvalidInput, match="at most"):
            messages.reply(sock, "a")
    put(nodes)
    assert got(nodes, nodes.ring()) == dict(CPU_TREE)


def test_a_node_takes_no_more_connections_than_it_can_serve(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes.nodes["a"]
    monkeypatch.setattr(node, "_room", threading.BoundedSemaphore(2))
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(nodes.ring().connect("a"))
        with pytest.raises(Unavailable, match=str(node_module.MAX_CONNECTIONS)):
            nodes.ring().connect("a")


class Liar:
    """A node that answers every request with what a test says."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        listener = wire.listening_at("127.0.0.1", 0)
        self.address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        self._acceptor = wire.Acceptor(listener, self._serve, "liar")

    def _serve(self, sock: socket.socket) -> None:
        try:
            wire.receive_frame(sock)
            sock.sendall(wire.OK + b"\0\0\0\2{}")
            for answer in self._answers:
                wire.receive_frame(sock)
                sock.sendall(answer)
        except (wire.Closed, OSError):
            return

    def close(self) -> None:
        self._acceptor.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\0", b"\0\xff\xff\xff\xff", b"\0\0\0\0\1x", b"\7\0\0\0\2{}", b'\0\0\0\0\x10{"holding": "x"}',
        b'\1\0\0\0\x12{"code": "unheard"}', b"\1\0\0\0\2[]",
    ],
)  # fmt: skip
def test_a_node_that_answers_nonsense_is_passed_over(answer: bytes, nodes: Nodes) -> None:
    put(nodes)
    liar = Liar(answer)
    ring = nodes.ring()
    first = ring.find(a_key())
    assert isinstance(first, Present)
    ring.members = Membership(99, {**nodes.members.nodes, first.nodes[0]: liar.address})
    assert got(nodes, ring) == dict(CPU_TREE)
    with pytest.raises(RemoteFault), ring.connect(first.nodes[0]) as peer:
        peer.find(a_key().digest)
    liar.close()


def test_over_tls_a_node_is_read_with_a_certificate_and_not_without(tmp_path: Path) -> None:
    pki.make(tmp_path, ("node",), SystemClock())
    files = TlsFiles(tmp_path / "node.pem", tmp_path / "node.key", tmp_path / "ca.pem")
    own = Nodes(tmp_path / "nodes")
    store = Store(tmp_path / "a", own.trust, own.clock, quota=1 << 30)
    served = CacheNode("a", store, GRANT_KEY, own.clock, host="127.0.0.1", tls=files)
    try:
        own.members = Membership(1, {"a": served.address})
        ring = Ring(own.members, own.grant, own.trust, own.clock, holder="t", tls=files)
        with sealed_tree(tmp_path, own.signer, files=LARGE) as tree:
            ring.publish(tree)
        assert got(own, ring) == LARGE
        found = Ring(own.members, own.grant, own.trust, own.clock, holder="t").find(a_key())
        assert isinstance(found, Absent)
        assert "expected an address" in found.reason
    finally:
        served.close()


def test_a_node_gives_no_bundle_up_for_one_that_is_only_claimed(nodes: Nodes) -> None:
    name = put(nodes)
    held = nodes.holders(name)
    listing = {
        "revision": nodes.revision,
        "holdings": [{"key": a_key().digest, "bundle": "0" * 64, "bytes": 1, "last_use": 9e9}],
        "quarantines": [],
    }
    said = json.dumps(listing).encode()
    liar = Liar(wire.OK + len(said).to_bytes(4, "big") + said)
    nodes.members = Membership(nodes.revision, {**nodes.members.nodes, "liar": liar.address})
    for node in nodes.nodes.values():
        node.set_members(nodes.members)
    nodes.repair()
    assert set(held) <= set(nodes.holders(name))
    liar.close()
