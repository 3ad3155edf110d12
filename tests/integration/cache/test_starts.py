"""The seam of engine starts: an engine that is asked to compile finds its bundle the next time; and whatever the cache
does, it starts."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cache import CPU_TREE, SETTLED, START, Nodes, contents, make_tree
from tests.unit.cache.test_outcomes import FAILED, LOADED, OTHER, SAVED

from relight.agent.cache import archive
from relight.agent.cache.key import CacheKey, describe
from relight.agent.cache.outcome import Verdict
from relight.agent.cache.ring import Ring
from relight.agent.cache.signing import Signer
from relight.agent.cache.start import CacheRecord, CompileCache, Prepared
from relight.agent.cache.store import Store

TOOK = "init engine (profile, create kv cache, warmup model) took {} s\n"


class Host:
    """A node that starts engines, each in a directory of its own."""

    def __init__(self, nodes: Nodes, directory: Path, ring: Ring | None = None, store: Store | None = None) -> None:
        self.directory = directory
        self.cache = CompileCache(ring or nodes.ring(directory.name), nodes.signer, nodes.clock, archive=store)
        self._starts = 0

    def prepare(self, start=START, wait_seconds: float = 5.0) -> Prepared:
        self._starts += 1
        return self.cache.prepare(start, self.directory / f"start-{self._starts}" / "compile", wait_seconds)

    def run(self, start=START) -> CacheRecord:
        """One whole start of an engine that compiles what it does not find."""
        prepared = self.prepare(start)
        root = Path(prepared.environment["VLLM_CACHE_ROOT"]).parent
        if contents(root):
            return self.cache.finish(prepared, LOADED + TOOK.format("5.0"))
        make_tree(root)
        return self.cache.finish(prepared, SAVED + TOOK.format("105.0"))


@pytest.fixture
def host(nodes: Nodes, tmp_path: Path) -> Host:
    return Host(nodes, tmp_path / "host-1")


def test_what_one_start_compiles_the_next_one_anywhere_finds(nodes: Nodes, host: Host, tmp_path: Path) -> None:
    cold = host.run()
    assert cold.outcome is not None
    assert cold.outcome.verdict is Verdict.COMPILED
    assert cold.outcome.compiled == len(CPU_TREE)
    assert len(cold.published) == 2
    warm = Host(nodes, tmp_path / "host-2").run()
    assert warm.outcome is not None
    assert (warm.outcome.installed, warm.outcome.selected, warm.outcome.hit) == (True, True, True)
    assert warm.outcome.compiled == 0
    assert warm.installed is not None
    assert warm.installed.files == len(CPU_TREE)
    assert warm.bundle == cold.bundle
    assert warm.saved is not None
    assert 99 < warm.saved <= 100
    assert contents(tmp_path / "host-2" / "start-1" / "compile") == dict(CPU_TREE)


def test_a_start_of_another_key_compiles_and_says_what_changed(host: Host) -> None:
    host.run()
    record = host.run(replace(START, versions={**START.versions, "torch": "2.14.0"}))
    assert [str(d) for d in record.changed] == ["version.torch: '2.14.0' here, '2.13.0+cpu' there"]
    assert record.reason == "no bundle of this key"
    assert record.published


def test_a_bundle_that_fails_to_load_is_quarantined_and_the_next_start_compiles(host: Host) -> None:
    host.run()
    record = host.cache.finish(host.prepare(), FAILED + SAVED)
    assert record.outcome is not None
    assert record.outcome.verdict is Verdict.NOT_LOADED
    assert "finalize_loading" in record.quarantined
    after = host.prepare()
    assert after.record.installed is None
    assert "finalize_loading" in after.record.reason
    assert after.environment


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGILL])
def test_a_bundle_in_whose_code_an_engine_died_is_quarantined(number: int, host: Host) -> None:
    host.run()
    assert str(-number) in host.cache.abandon(host.prepare(), "", -number).quarantined
    assert host.prepare().record.installed is None


@pytest.mark.parametrize("exit_code", [1, -signal.SIGKILL, -signal.SIGTERM, None])
def test_a_failed_start_that_says_nothing_of_the_bundle_does_not_accuse_it(exit_code, host: Host) -> None:
    host.run()
    assert not host.cache.abandon(host.prepare(), "CUDA out of memory", exit_code).quarantined
    assert host.prepare().record.installed is not None


def test_a_start_that_failed_lets_the_next_one_compile(nodes: Nodes, host: Host, tmp_path: Path) -> None:
    first = host.prepare()
    assert first.claim is not None
    other = Host(nodes, tmp_path / "host-2")
    waiting = other.prepare(wait_seconds=0.1)
    assert waiting.claim is None
    assert "host-1 has been compiling" in waiting.record.reason
    host.cache.abandon(first, "", 1)
    assert other.prepare().claim is not None


def test_a_bundle_that_the_engine_does_not_select_is_reported_with_both_keys(host: Host) -> None:
    host.run()
    prepared = host.prepare()
    make_tree(prepared.root, {f"{OTHER}/rank_0_0/model": b"its own"})
    record = host.cache.finish(prepared, SAVED)
    assert record.outcome is not None
    assert record.outcome.verdict is Verdict.NOT_SELECTED
    assert "ffffffffffff" in record.outcome.reason
    assert not record.quarantined


def test_what_every_node_has_wrongly_is_not_installed_and_the_engine_compiles(nodes: Nodes, host: Host) -> None:
    record = host.run()
    for name in nodes.holders(record.bundle):
        body = nodes.stores[name].body(record.bundle)
        body.write_bytes(bytes(body.stat().st_size))
    prepared = host.prepare()
    assert prepared.record.installed is None
    assert "not what was signed" in prepared.record.reason
    assert prepared.environment
    assert not contents(prepared.root.parent)


def test_who_trusts_other_signers_installs_nothing(nodes: Nodes, host: Host, tmp_path: Path) -> None:
    host.run()
    stranger = nodes.ring("stranger")
    stranger.trust = type(stranger.trust)([Signer.new().public])
    prepared = Host(nodes, tmp_path / "host-2", stranger).prepare()
    assert "not trusted here" in prepared.record.reason
    assert not contents(tmp_path / "host-2")


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_however_many_nodes_are_gone_the_engine_starts(lost: int, nodes: Nodes, host: Host) -> None:
    host.run()
    for name in ("a", "b", "c")[:lost]:
        nodes.kill(name, forget=False)
    prepared = host.prepare()
    assert prepared.environment["VLLM_CACHE_ROOT"]
    assert (prepared.record.installed is not None) == (lost < 2 or bool(nodes.holders(prepared.record.bundle)))
    host.cache.finish(prepared, LOADED)


def test_a_cache_that_fails_in_any_way_starts_the_engine_all_the_same(nodes: Nodes, tmp_path: Path) -> None:
    class Broken(Ring):
        def obtain(self, key: CacheKey, deadline_seconds: float, waits):
            raise ZeroDivisionError

    broken = Broken(nodes.members, nodes.grant, nodes.trust, nodes.clock, holder="x")
    prepared = Host(nodes, tmp_path / "host", broken).prepare()
    assert prepared.environment
    assert prepared.record.reason == "no bundle: ZeroDivisionError"
    unknown = CompileCache(None, nodes.signer, nodes.clock).prepare(replace(START, engine="stub"), tmp_path / "s", 1.0)
    assert unknown.environment == {}
    assert "vllm or sglang" in unknown.record.reason
    assert CompileCache(None, nodes.signer, nodes.clock).finish(unknown, "").outcome is None
    (tmp_path / "file").write_text("in the way")
    blocked = Host(nodes, tmp_path / "file").prepare()
    assert blocked.environment


def test_an_engine_that_does_not_stop_writing_publishes_nothing_and_serves(host: Host) -> None:
    prepared = host.prepare()
    make_tree(prepared.root, {**CPU_TREE, "vllm/modelinfos/x.tmp": b"half"})
    record = host.cache.finish(prepared, SAVED, settle_seconds=0.0)
    assert not record.published
    assert "still being written" in record.not_published
    assert host.prepare().claim is not None


def test_what_lay_in_a_root_is_not_used_by_the_next_start(nodes: Nodes, host: Host, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", {"triton/of-another-start": b"1"}, SETTLED)
    prepared = host.cache.prepare(START, root, 5.0)
    assert not root.exists()
    host.cache.abandon(prepared, "", 1)


# ---------------------------------------------------------------------- archives


def test_an_archive_carries_a_ring_into_one_that_never_met_it(nodes: Nodes, host: Host, tmp_path: Path) -> None:
    cold = host.run()
    carried = Store(tmp_path / "archive", nodes.trust, nodes.clock, quota=1 << 30)
    assert archive.export(nodes.ring(), carried).bundles == (cold.bundle,)
    assert archive.export(nodes.ring(), carried, frozenset()).bundles == ()
    far = Nodes(tmp_path / "far", nodes.signer)
    try:
        far.start("x", "y")
        again = Store(tmp_path / "archive", nodes.trust, nodes.clock, quota=1 << 30)
        assert archive.load(again, far.ring()).bundles == (cold.bundle,)
        assert Host(far, tmp_path / "far-host").run().bundle == cold.bundle
    finally:
        far.close()


def test_a_bundle_baked_into_an_image_is_installed_without_any_ring(nodes: Nodes, host: Host, tmp_path: Path) -> None:
    cold = host.run()
    carried = Store(tmp_path / "archive", nodes.trust, nodes.clock, quota=1 << 30)
    archive.export(nodes.ring(), carried)
    alone = CompileCache(None, nodes.signer, nodes.clock, archive=carried)
    prepared = alone.prepare(START, tmp_path / "alone", 1.0)
    assert prepared.record.reason == "from the archive"
    assert contents(tmp_path / "alone") == dict(CPU_TREE)
    carried.body(cold.bundle).write_bytes(b"tampered with on the way")
    refused = alone.prepare(START, tmp_path / "refused", 1.0)
    assert refused.record.installed is None
    assert not (tmp_path / "refused").exists()


def test_an_archive_with_a_strangers_bundle_gives_the_ring_nothing(nodes: Nodes, tmp_path: Path) -> None:
    other = Nodes(tmp_path / "other")
    try:
        other.start("x")
        Host(other, tmp_path / "other-host").run()
        carried = Store(tmp_path / "archive", other.trust, other.clock, quota=1 << 30)
        archive.export(other.ring(), carried)
        said = archive.load(carried, nodes.ring())
        assert said.bundles == ()
        assert "not trusted" in said.failed[0]
        assert not nodes.ring().holdings()
    finally:
        other.close()


def test_the_key_of_a_start_is_that_of_its_description(host: Host) -> None:
    assert host.run().key == describe(START).digest
