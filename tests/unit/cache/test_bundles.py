"""Bundles from outside: tampered, unsigned, of another key, too large, or reaching out of their directory, they are
refused by name, and nothing on disk has changed."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relight.agent.cache import bundle
from relight.agent.cache.bundle import Limits, Sealed
from relight.agent.cache.install import install
from relight.agent.cache.sealing import SealedTree
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Store
from relight.core.clock import SystemClock
from relight.core.errors import Denied, InvalidInput, LocalFault, Unavailable
from tests.support.cache import AOT, CPU_TREE, LEFT_OUT, a_key, contents, make_tree, sealed_tree

SIGNER = Signer.new()
TRUST = Trust([SIGNER.public])
LIMITS = Limits()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[SealedTree]:
    with sealed_tree(tmp_path, SIGNER, files={**CPU_TREE, **LEFT_OUT}) as made:
        yield made


class Given:
    """A bundle whose chunks are whatever a test says."""

    def __init__(self, manifest: bundle.Manifest, body: bytes) -> None:
        self.name, self.manifest, self._body = "given", manifest, body

    def chunks(self) -> Iterator[memoryview]:
        for number in range(len(self.manifest.chunks)):
            data = self._body[number * bundle.CHUNK_BYTES : (number + 1) * bundle.CHUNK_BYTES]
            bundle.prove(self.manifest, number, data)
            yield memoryview(data)


def _signed(manifest: bytes, signer: Signer = SIGNER) -> Sealed:
    return Sealed(manifest, signer.name, signer.sign(manifest))


def _changed(tree: SealedTree, change: Callable[[dict[str, Any]], None]) -> Sealed:
    raw = json.loads(tree.sealed.manifest)
    change(raw)
    return _signed(json.dumps(raw).encode())


def test_what_is_installed_is_what_was_compiled_and_nothing_else(tree: SealedTree, tmp_path: Path) -> None:
    manifest = bundle.verify(tree.sealed, TRUST, LIMITS, a_key())
    root = tmp_path / "place" / "root"
    done = install(Given(manifest, tree.body.read_bytes()), root)
    assert contents(root) == dict(CPU_TREE)
    assert done.files == len(CPU_TREE)
    assert done.bytes == sum(map(len, CPU_TREE.values()))
    assert stat.S_IMODE((root / AOT / "inductor_cache/24/c244b2.so").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / AOT / "rank_0_0/model").stat().st_mode) == 0o600
    assert [p.name for p in root.parent.iterdir()] == ["root"]


def test_equal_trees_give_equal_bundles(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        with sealed_tree(tmp_path, SIGNER) as made:
            names.append(made.sealed.name)
    assert names[0] == names[1]


def test_a_body_of_many_chunks_survives(tmp_path: Path) -> None:
    files = {"triton/a": bytes(bundle.CHUNK_BYTES - 1), "triton/b": b"xyz" * bundle.CHUNK_BYTES, "triton/c": b"12"}
    with sealed_tree(tmp_path, SIGNER, files=files) as made:
        assert len(made.manifest.chunks) == 5
        install(Given(made.manifest, made.body.read_bytes()), tmp_path / "root")
    assert contents(tmp_path / "root") == files


@pytest.mark.parametrize(
    ("alter", "names"),
    [
        (lambda s: replace(s, signature=b""), "unsigned"),
        (lambda s: replace(s, signer=""), "unsigned"),
        (lambda s: replace(s, signature=b"short"), "64"),
        (lambda s: replace(s, manifest=s.manifest.replace(b"100.0", b"200.0")), "altered"),
        (lambda s: replace(s, signature=bytes(64)), "altered"),
        (lambda s: _signed(s.manifest, Signer.new()), "not trusted"),
        (lambda s: Sealed(s.manifest, SIGNER.name, Signer.new().sign(s.manifest)), "altered"),
    ],
)
def test_a_manifest_that_no_trusted_key_signed_is_refused(alter, names: str, tree: SealedTree) -> None:
    with pytest.raises(Denied, match=names):
        bundle.verify(alter(tree.sealed), TRUST, LIMITS, a_key())


def test_a_bundle_for_another_key_is_refused_naming_the_component(tree: SealedTree) -> None:
    with pytest.raises(Denied, match=r"another key: model: '/models/m1' here, '/models/m0' there"):
        bundle.verify(tree.sealed, TRUST, LIMITS, a_key(1))


def test_a_bundle_that_is_too_large_is_refused_before_its_body_is_asked_for(tree: SealedTree) -> None:
    for limits in (Limits(body_bytes=100), Limits(files=3)):
        with pytest.raises(InvalidInput, match="too large"):
            bundle.verify(tree.sealed, TRUST, limits)
    huge = _signed(b"x" * (Limits(files=3).manifest_bytes + 1))
    with pytest.raises(InvalidInput, match="too large"):
        bundle.verify(huge, TRUST, Limits(files=3))


def _files(raw: dict[str, Any], column: str, value: object) -> None:
    raw["files"][column][0] = value


def _path(path: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: _files(raw, "path", path)


def _mode(mode: object) -> Callable[[dict[str, Any]], None]:
    return lambda raw: _files(raw, "mode", mode)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_path("/etc/passwd"), "absolute"),
        (_path("../outside"), r"'\.\.'"),
        (_path("triton/../../outside"), r"'\.\.'"),
        (_path("triton//x"), "empty parts"),
        (_path("./x"), r"'\.'"),
        (_path("triton\\..\\x"), "backslash"),
        (_path("triton/\0x"), "NUL"),
        (_path(""), "a path"),
        (_path("triton/" + "x" * 256), "parts of at most 255"),
        (_mode(stat.S_IFLNK | 0o777), "a symbolic link"),
        (_mode(stat.S_IFCHR | 0o600), "a character device"),
        (_mode(stat.S_IFBLK | 0o600), "a block device"),
        (_mode(stat.S_IFIFO | 0o600), "a pipe"),
        (_mode(stat.S_IFSOCK | 0o600), "a socket"),
        (_mode(stat.S_IFDIR | 0o700), "a directory"),
        (_mode(stat.S_IFREG | 0o4700), "files.mode"),
        (_mode(stat.S_IFREG | 0o666), "files.mode"),
        (_mode("x"), "files.mode"),
        (lambda raw: _files(raw, "path", raw["files"]["path"][1]), "hard links"),
        (lambda raw: _files(raw, "path", raw["files"]["path"][1] + "/x"), "directories that are no files"),
        (lambda raw: raw["files"].update(link=["x"] * len(raw["files"]["path"])), "files"),
        (lambda raw: _files(raw, "bytes", -1), "files.bytes"),
        (lambda raw: _files(raw, "bytes", True), "files.bytes"),
        (lambda raw: raw["files"]["bytes"].pop(), "files.bytes"),
        (lambda raw: raw["chunks"].append("0" * 64), "chunks"),
        (lambda raw: raw["chunks"].__setitem__(0, "../x"), "chunks"),
        (lambda raw: raw.update(chunk_bytes=1), "chunk_bytes"),
        (lambda raw: raw.update(version=2), "version"),
        (lambda raw: raw.update(extra=1), "manifest"),
        (lambda raw: raw.update(key={"a": 1}), "key"),
        (lambda raw: raw.update(compile_seconds=float("inf")), "compile_seconds"),
        (lambda raw: raw.update(built_at=3), "built_at"),
    ],
)  # fmt: skip
def test_a_signed_manifest_that_reaches_out_or_is_odd_is_refused_by_name(change, names: str, tree: SealedTree) -> None:
    with pytest.raises(InvalidInput, match=names):
        bundle.verify(_changed(tree, change), TRUST, LIMITS)


def test_a_path_that_is_no_cache_of_the_engine_is_not_installed(tree: SealedTree, tmp_path: Path) -> None:
    manifest = bundle.verify(_changed(tree, _path("bin/sh")), TRUST, LIMITS)
    with pytest.raises(InvalidInput, match="bin/sh"):
        install(Given(manifest, tree.body.read_bytes()), tmp_path / "place" / "root")
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("where", [0, -1])
def test_a_tampered_body_is_refused_and_nothing_has_changed(where: int, tree: SealedTree, tmp_path: Path) -> None:
    body = bytearray(tree.body.read_bytes())
    body[where] ^= 1
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(Denied, match="chunk 0"):
        install(Given(tree.manifest, bytes(body)), place / "root")
    assert not list(place.iterdir())


def test_what_is_in_a_place_is_never_overwritten(tree: SealedTree, tmp_path: Path) -> None:
    taken = make_tree(tmp_path / "taken", {"triton/mine": b"1"})
    link = tmp_path / "link"
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    for place in (taken, link):
        with pytest.raises(LocalFault, match="in use"):
            install(Given(tree.manifest, tree.body.read_bytes()), place)
    assert contents(taken) == {"triton/mine": b"1"}
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "alter", [lambda b: b[:-1] + b"\0", lambda b: b"\0" + b[1:], lambda b: bytes(len(b)), lambda b: b""]
)
def test_a_store_takes_no_body_that_was_not_signed(alter, tree: SealedTree, tmp_path: Path) -> None:
    store = Store(tmp_path / "store", TRUST, SystemClock(), quota=1 << 30)
    incoming = store.receive(tree.sealed)
    assert incoming is not None
    with incoming, pytest.raises(Denied, match="chunk 0"):
        incoming.chunk(alter(tree.body.read_bytes()))
    assert not store.entries()
    assert not list((tmp_path / "store" / "incoming").iterdir())


def test_a_tree_that_is_still_written_is_not_sealed(tmp_path: Path) -> None:
    class Now:
        def now(self) -> float:
            return 1_700_000_001.0

        def monotonic(self) -> float:
            return 0.0

    with pytest.raises(Unavailable, match="still being written"), sealed_tree(tmp_path, SIGNER, clock=Now()):
        pass
    with (
        pytest.raises(Unavailable, match="still being written"),
        sealed_tree(tmp_path, SIGNER, files={**CPU_TREE, f"{AOT}/rank_0_0/model.77.tmp": b"half"}),
    ):
        pass
    with pytest.raises(InvalidInput, match="nothing was compiled"), sealed_tree(tmp_path, SIGNER, files=LEFT_OUT):
        pass
    assert not list(tmp_path.iterdir())


def test_links_and_sockets_in_a_tree_stay_out(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("not ours")
    root = make_tree(tmp_path / "compiled")
    (root / "triton").mkdir()
    (root / "triton" / "link").symlink_to(outside)
    (root / "triton" / "folder").symlink_to(tmp_path)
    with sealed_tree(tmp_path, SIGNER) as made:
        assert [f.path for f in made.manifest.files] == sorted(CPU_TREE)


def test_a_bundle_is_named_by_its_manifest(tree: SealedTree) -> None:
    assert tree.sealed.name == hashlib.sha256(tree.sealed.manifest).hexdigest()


def test_a_signing_key_survives_its_file_and_another_kind_is_refused(tmp_path: Path) -> None:
    SIGNER.save(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert Signer.load(tmp_path / "key").public == SIGNER.public
    (tmp_path / "bad").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    for name in ("bad", "absent"):
        with pytest.raises(InvalidInput, match=name):
            Signer.load(tmp_path / name)
    with pytest.raises(InvalidInput, match="64 hexadecimal digits"):
        Trust(["zz"])
