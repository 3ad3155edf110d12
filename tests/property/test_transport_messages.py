"""Whatever a peer says of its memory is taken whole or refused by a typed error; and where bytes lie in its pieces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from relight.core.errors import InvalidInput
from relight.transfer.transports.cuda import FABRIC, FD, IPC, Mapped, Piece, pieces
from relight.transfer.transports.nixl_agent import Region
from relight.transfer.transports.nvlink import places

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70)
anything = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner))


def _nearly(good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A message of the right form, some of whose fields hold anything."""
    return st.fixed_dictionaries({name: st.just(value) | anything for name, value in good.items()})


REGION = asdict(Region("relight-x", 1 << 40, 1 << 21, -1))
PIECE = asdict(Piece(IPC, 0, 1 << 21, "ab" * 64))


@given(anything | _nearly(REGION))
def test_a_region_is_taken_whole_or_refused(raw: object) -> None:
    try:
        taken = Region.parse(raw)
    except InvalidInput:
        return
    assert taken.plain() == raw
    assert taken.agent.startswith("relight-")
    assert taken.bytes > 0


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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_a_read_covers_its_bytes_once_and_in_order_whatever_the_pieces(sizes: list[int], data: st.DataObject) -> None:
    # Pieces lie far apart here, whatever they were at the source.
    mapped = [Mapped(1000 * (n + 1), size, 0, 0, FD) for n, size in enumerate(sizes)]
    offset = data.draw(st.integers(0, sum(sizes) - 1))
    length = data.draw(st.integers(1, sum(sizes) - offset))
    got = [address + at for address, count in places(mapped, offset, length) for at in range(count)]
    there = [m.address + at for m in mapped for at in range(m.bytes)]
    assert got == there[offset : offset + length]
