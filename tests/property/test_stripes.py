"""Properties of the read plan: every byte by exactly one stream, in order, and evenly."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from relight.core.fingerprint import Fingerprint
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.plan import HUGE, shares, stripes


@st.composite
def manifests(draw: st.DrawFn) -> WeightManifest:
    sizes = draw(st.lists(st.integers(0, 1 << 20), max_size=60))
    entries, offset = [], 0
    for n, size in enumerate(sizes):
        entries.append(TensorEntry(f"t{n}", "uint8", (size,), (1,), offset, size, "0" * 32))
        offset += size + draw(st.integers(0, 300))
    return WeightManifest(Fingerprint(), 0, max(offset, 1), tuple(draw(st.permutations(entries))))


@given(manifests(), st.integers(1, 9))
def test_every_tensor_with_bytes_is_read_by_exactly_one_stream(manifest: WeightManifest, streams: int) -> None:
    made = stripes(manifest, streams)
    read = [t.name for stripe in made for t in stripe.tensors]
    assert sorted(read) == sorted(t.name for t in manifest.tensors if t.bytes)
    assert len(made) <= streams


@given(manifests(), st.integers(1, 9))
def test_stripes_are_in_order_and_do_not_overlap(manifest: WeightManifest, streams: int) -> None:
    end = 0
    for stripe in stripes(manifest, streams):
        assert end <= stripe.start < stripe.stop
        offsets = [t.offset for t in stripe.tensors]
        assert offsets == sorted(offsets)
        assert (stripe.start, stripe.stop) == (offsets[0], offsets[-1] + stripe.tensors[-1].bytes)
        end = stripe.stop


@given(manifests(), st.integers(1, 9))
def test_no_stripe_exceeds_its_even_share_by_more_than_its_largest_tensor(
    manifest: WeightManifest, streams: int
) -> None:
    total = manifest.weight_bytes
    for stripe in stripes(manifest, streams):
        assert stripe.bytes <= total / streams + max(t.bytes for t in manifest.tensors) * streams


@given(st.integers(1, 1 << 40), st.integers(1, 64))
def test_pages_are_dealt_out_once_evenly_and_whole(length: int, streams: int) -> None:
    dealt = shares(length, streams)
    assert len(dealt) == streams
    assert dealt[0][0] == 0
    assert dealt[-1][1] == length
    assert all(first[1] == second[0] for first, second in pairwise(dealt))
    assert all(start % HUGE == 0 for start, stop in dealt if stop > start)
    pages = [-(-(stop - start) // HUGE) for start, stop in dealt]
    assert max(pages) - min(pages) <= 1
