"""Whatever a peer says of its memory is taken whole or refused by a typed error; and where bytes lie in its pieces."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.extents import APART, Extent, Extents, lay_out
from relight.transfer.transports.cuda import FABRIC, FD, IPC, Mapped, Piece, pieces
from relight.transfer.transports.nixl_agent import Region
from relight.transfer.transports.nvlink import place

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70)
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner))


def _nearly(good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A message of the right form, some of whose fields hold anything."""
    return st.fixed_dictionaries({name: st.just(value) | anything for name, value in good.items()})


REGION = Region("relight-x", Extents([Extent(0, 1 << 40, 1 << 21)]), -1).plain()
PIECE = asdict(Piece(IPC, 0, 1 << 21, "ab" * 64))


@given(anything | _nearly(REGION))
def test_a_region_is_taken_whole_or_refused(raw: object) -> None:
    try:
        taken = Region.parse(raw)
    except InvalidInput:
        return
    assert taken.plain() == raw
    assert taken.agent.startswith("relight-")
    assert taken.pieces.bytes > 0


@given(anything | st.lists(_nearly(PIECE), max_size=3))
def test_pieces_are_taken_whole_or_refused(raw: object) -> None:
    try:
        taken = pieces(raw)
    except InvalidInput:
        return
    assert [asdict(piece) for piece in taken] == raw
    for piece in taken:
        assert piece.kind in (FD, FABRIC, IPC)
        assert piece.bytes > 0 <= piece.skip
        assert len(bytes.fromhex(piece.handle)) == (0 if piece.kind == FD else 64)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_bytes_lie_where_their_piece_does_and_no_read_crosses_an_edge(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Pieces of one segment, near each other in memory or not: their places, and what a reader makes of them."""
    address, ranges = 1000, []
    for size, gap in sizes:
        ranges.append((address, size, True))
        address += size + gap
    extents = lay_out(data.draw(st.permutations(ranges)))
    assert [(e.address, e.bytes) for e in extents] == [(low, size) for low, size, _ in ranges]
    assert all(b.offset - a.offset - a.bytes == APART for a, b in itertools.pairwise(extents))
    mapped = [Mapped(1 << 20 << n, e.bytes, 0, 0, FD, e.offset) for n, e in enumerate(extents)]
    number = data.draw(st.integers(0, len(extents) - 1))
    start = data.draw(st.integers(0, extents[number].bytes - 1))
    length = data.draw(st.integers(1, extents[number].bytes - start))
    offset = extents[number].offset + start
    assert extents.at(offset, offset + length) == extents[number].address + start
    assert place(mapped, offset, length) == mapped[number].address + start
    over = extents[number].bytes - start + 1
    for beyond in (lambda: extents.at(offset, offset + over), lambda: place(mapped, offset, over)):
        with pytest.raises(LocalFault, match="does not lie in one piece"):
            beyond()
