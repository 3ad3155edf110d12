"""Properties of how bytes are cut and placed: every byte once, whatever lies where."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.core.errors import InvalidInput
from relight.transfer.chunks import MOST_PADDING, Places, chunk_bytes, cut, of_parts
from relight.transfer.manifest import TensorEntry
from relight.transfer.plan import HUGE, shares
from relight.transfer.verify import BLOCK_BYTES, DIGEST_BYTES, block_count


def _entry(n: int, size: int, offset: int) -> TensorEntry:
    blocks = b"".join(n.to_bytes(8, "big") + b.to_bytes(8, "big") for b in range(block_count(size)))
    return TensorEntry(f"t{n}", "uint8", (size,), (1,), offset, size, (), blocks)


def _laid_out(tensors: list[TensorEntry], order: list[int], gaps: list[int]) -> dict[str, TensorEntry]:
    placed, at = {}, 0
    for n, gap in zip(order, gaps, strict=True):
        placed[tensors[n].name] = replace(tensors[n], offset=at)
        at += tensors[n].bytes + gap
    return placed


@st.composite
def bodies(draw: st.DrawFn) -> tuple[list[TensorEntry], dict[str, TensorEntry]]:
    """A holder's tensors in the order of their places, and the receiver's places for the same."""
    sizes = draw(st.lists(st.integers(0, 5 * BLOCK_BYTES), max_size=40))
    count = len(sizes)
    tensors = [_entry(n, size, 0) for n, size in enumerate(sizes)]
    gaps = st.lists(st.sampled_from([0, 0, 1, 255, 3 * BLOCK_BYTES]), min_size=count, max_size=count)
    same = draw(gaps)
    theirs = list(_laid_out(tensors, list(range(count)), same).values())
    if draw(st.booleans()):
        return theirs, _laid_out(tensors, list(range(count)), same)
    return theirs, _laid_out(tensors, draw(st.permutations(range(count))), draw(gaps))


@given(bodies())
def test_every_byte_is_in_exactly_one_chunk_and_chunks_are_even(body) -> None:
    theirs, _ = body
    total = sum(t.bytes for t in theirs)
    chunks = cut(theirs)
    assert [c.number for c in chunks] == list(range(len(chunks)))
    assert sum(c.bytes for c in chunks) == total
    spans = [s for c in chunks for s in c.spans]
    for one, two in pairwise(spans):
        assert (two.tensor, two.start) == (
            (one.tensor, one.stop) if one.stop < theirs[one.tensor].bytes else (two.tensor, 0)
        )
        assert two.tensor >= one.tensor
    assert all(s.start % BLOCK_BYTES == 0 and s.stop > s.start for s in spans)
    size = chunk_bytes(total)
    assert all(c.bytes < size + BLOCK_BYTES for c in chunks)
    assert all(c.bytes >= size for c in chunks[:-1])


@given(bodies())
def test_runs_bring_every_byte_of_a_chunk_to_its_place_and_nothing_over_another_tensor(body) -> None:
    theirs, ours = body
    places, chunks = Places(theirs, ours), cut(theirs)
    for some in [[c] for c in chunks] + [list(chunks)]:
        written: list[tuple[int, int]] = []
        proven: dict[str, int] = {}
        for run in places.runs(some):
            steps = list(run.steps())
            assert run.bytes == sum(step.stop - step.start for step in steps)
            assert b"".join(step.digests for step in steps) == run.whole.digests
            shift = run.there - run.whole.start
            for start, stop, pieces in steps:
                written.append((start, stop))
                for piece in pieces:
                    tensor, mine = theirs[piece.tensor], ours[theirs[piece.tensor].name]
                    at = piece.start - mine.offset
                    assert start <= piece.start < piece.stop <= stop
                    assert piece.start + shift == tensor.offset + at
                    place = at // BLOCK_BYTES * DIGEST_BYTES
                    assert piece.digests == tensor.blocks[place : place + DIGEST_BYTES]
                    proven[tensor.name] = proven.get(tensor.name, 0) + piece.stop - piece.start
        assert sum(proven.values()) == sum(c.bytes for c in some)
        names = {theirs[s.tensor].name for c in some for s in c.spans}
        for tensor in ours.values():
            if tensor.name not in names and tensor.bytes:
                assert all(stop <= tensor.offset or start >= tensor.offset + tensor.bytes for start, stop in written)


@given(bodies())
def test_a_body_that_lies_alike_on_both_sides_is_one_run_but_for_holes_that_may_be_somebodys(body) -> None:
    theirs, _ = body
    whole = [t for t in theirs if t.bytes]
    holes = sum(b.offset - a.offset - a.bytes >= MOST_PADDING for a, b in pairwise(whole))
    runs = Places(whole, {t.name: t for t in whole}).runs(cut(whole))
    assert len(runs) == (holes + 1 if whole else 0)
    assert sum(run.bytes for run in runs) < sum(t.bytes + MOST_PADDING for t in whole) + 1


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


@given(st.integers(0, 2000), st.integers(1, 200), st.randoms(use_true_random=False))
def test_every_chunk_lies_in_one_part_whatever_their_numbers(chunks: int, parts: int, random) -> None:
    assert of_parts(range(parts), parts, chunks) == list(range(chunks))
    dealt = list(range(parts))
    random.shuffle(dealt)
    assert sorted(of_parts(dealt, parts, chunks)) == list(range(chunks))
    largest = max(len(of_parts([n], parts, chunks)) for n in range(parts))
    assert largest <= -(-chunks // parts)


@given(st.integers(-3, 10), st.integers(1, 5))
def test_a_part_that_does_not_exist_is_refused_by_number(part: int, parts: int) -> None:
    if not 0 <= part < parts:
        with pytest.raises(InvalidInput, match=f"part {part} of {parts} does not exist"):
            of_parts([part], parts, 100)
