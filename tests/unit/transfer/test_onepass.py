"""Copying and digesting in one pass: the same bytes and digests as in two, on every width that this processor has."""

from __future__ import annotations

import platform
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relight.transfer.onepass import SHORT, WIDTH, copied
from relight.transfer.verify import BLOCK_BYTES, Digest, blocks_of

SOURCE = bytearray(random.Random(1).randbytes(3 * BLOCK_BYTES + 4096))
WIDTHS = [width for width in (0, 256, 512) if width <= WIDTH]


def lengths() -> st.SearchStrategy[int]:
    """Around the algorithm's own edges (240, 256, 1024 bytes and stripes of 64) and around a block."""
    edges = (1, SHORT, 256, 512, 1024, 1088, 2048, 4096, BLOCK_BYTES, 2 * BLOCK_BYTES)
    return st.sampled_from(edges).flatmap(lambda edge: st.integers(max(edge - 2, 1), edge + 66))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), lengths()), max_size=6), st.integers(0, 65), st.sampled_from(WIDTHS),
    st.sampled_from(Digest),
)  # fmt: skip
def test_what_is_copied_and_its_digests_are_those_of_the_source(
    drawn: list[tuple[int, int]], shift: int, width: int, digest: Digest
) -> None:
    parts, at = [], 0
    for gap, length in drawn:
        if at + gap + length <= len(SOURCE) - shift:
            parts.append((at + gap, at + gap + length))
            at += gap + length
    source = memoryview(SOURCE)[shift:]
    before = bytes(random.Random(2).randbytes(len(source)))
    into = bytearray(before)
    found = copied(memoryview(into), source, parts, width, digest)
    assert found == b"".join(blocks_of(source[a:b], digest) for a, b in parts)
    outside = 0
    for start, stop in [*parts, (len(source), len(source))]:
        assert into[outside:start] == before[outside:start]
        assert into[start:stop] == source[start:stop]
        outside = stop


@pytest.mark.parametrize("width", [w for w in WIDTHS if w])
@pytest.mark.parametrize("part", [(0, BLOCK_BYTES + 1), (5000, 4000), (1 << 63, (1 << 63) + 4096), (0, 1 << 62)])
def test_a_part_outside_the_buffers_is_refused_and_nothing_is_written(part: tuple[int, int], width: int) -> None:
    into = bytearray(BLOCK_BYTES)
    with pytest.raises(ValueError, match="parts within them"):
        copied(memoryview(into), memoryview(SOURCE)[:BLOCK_BYTES], [(0, 4096), part], width)
    assert not any(into)


def test_buffers_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        copied(memoryview(bytearray(4096)), memoryview(SOURCE)[:4095], [(0, 4000)], WIDTH)


def test_a_width_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="width"):
        copied(memoryview(bytearray(4096)), memoryview(SOURCE)[:4096], [(0, 4096)], 1024)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="written for x86-64; elsewhere it is done in two passes")
def test_the_one_pass_was_built_and_is_as_wide_as_this_processor_allows() -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    assert (512 if "avx512f" in flags else 256 if "avx2" in flags else 0) == WIDTH
