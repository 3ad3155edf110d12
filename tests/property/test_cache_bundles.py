"""Properties of bundles and keys: what is sealed comes back, and no bytes from outside do anything but be refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from relight.agent.cache import bundle
from relight.agent.cache.bundle import CHUNK_BYTES, MODES, FileEntry, Limits, Manifest
from relight.agent.cache.key import CacheKey, describe
from relight.core.errors import InvalidInput
from tests.support.cache import START

part = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=8).filter(
    lambda p: p not in (".", "..")
)
texts = st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=40), min_size=1, max_size=8)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    paths = draw(st.sets(st.lists(part, min_size=1, max_size=3).map("/".join), max_size=8))
    above = {a for p in paths for a in accumulate(p.split("/")[:-1], "{}/{}".format)}
    files = tuple(
        FileEntry(p, draw(st.sampled_from(MODES)), draw(st.integers(0, 1 << 40)), draw(st.integers(0, 3 * CHUNK_BYTES)))
        for p in sorted(paths - above)
    )
    chunks = tuple(f"{n:064x}" for n in range(bundle.chunk_count(sum(f.bytes for f in files))))
    return Manifest(CacheKey(draw(texts)), "/root", draw(st.floats(0, 1e6)), files, chunks)


@given(manifests())
def test_a_manifest_survives_and_its_bytes_are_canonical(manifest: Manifest) -> None:
    data = bundle.dump(manifest)
    assert bundle.parse(data, Limits()) == manifest
    assert bundle.dump(bundle.parse(data, Limits())) == data


@given(manifests())
def test_the_pieces_of_all_chunks_are_every_byte_of_every_file_once_in_order(manifest: Manifest) -> None:
    filled = [0] * len(manifest.files)
    total = 0
    chunks = list(bundle.pieces(manifest.files))
    assert len(chunks) == len(manifest.chunks)
    for number, parts in enumerate(chunks):
        at = 0
        for piece in parts:
            assert (piece.start, piece.offset) == (at, filled[piece.file])
            at = piece.stop
            filled[piece.file] += piece.stop - piece.start
        assert at == bundle.chunk_length(manifest.body_bytes, number)
        total += at
    assert filled == [f.bytes for f in manifest.files]
    assert total == manifest.body_bytes


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    try:
        bundle.parse(data, Limits())
    except InvalidInput:
        return
    raise AssertionError("taken")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(manifests(), st.data())
def test_a_manifest_with_anything_in_the_place_of_a_field_is_refused_or_means_the_same(
    manifest: Manifest, data: st.DataObject
) -> None:
    raw = json.loads(bundle.dump(manifest))
    name = data.draw(st.sampled_from(sorted(raw)))
    where = raw
    if name == "files" and manifest.files and data.draw(st.booleans()):
        where, name = raw["files"], data.draw(st.sampled_from(sorted(raw["files"])))
        where[name][data.draw(st.integers(0, len(manifest.files) - 1))] = data.draw(values)
    else:
        where[name] = data.draw(values)
    try:
        taken = bundle.parse(json.dumps(raw).encode(), Limits())
    except InvalidInput:
        return
    assert all(not f.path.startswith("/") and ".." not in f.path.split("/") for f in taken.files)
    assert len(taken.chunks) == bundle.chunk_count(taken.body_bytes)


names = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789", min_size=1, max_size=20)


@given(st.dictionaries(names, st.text(max_size=10), max_size=5))
def test_equal_keys_have_equal_digests_and_different_ones_name_a_difference(more: dict[str, str]) -> None:
    one, two = describe(START), describe(replace(START, environment={**START.environment, **more}))
    assert (one.digest == two.digest) == (not one.differences(two)) == (one == two)


@given(st.permutations(["--a=1", "--b=2", "--flag", '--c={"x":[1,2]}']))
def test_the_order_of_arguments_does_not_matter(arguments: list[str]) -> None:
    assert describe(replace(START, arguments=tuple(arguments))) == describe(
        replace(START, arguments=("--a=1", "--b=2", "--flag", '--c={"x":[1,2]}'))
    )
