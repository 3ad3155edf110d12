"""A segment's pages: all of them come back and go again, huge while that is cheap and small otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.transfer import segment as module
from relight.transfer.plan import HUGE
from relight.transfer.segment import Segment

PAGES = 6


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment("test", PAGES * HUGE)
    yield made
    made.close()


def _mapped_huge(segment: Segment) -> int:
    """Bytes of the segment that this process maps as huge pages."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.startswith(f"{segment.address:x}-")
        elif inside and line.startswith("ShmemPmdMapped:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 1e9])
def test_all_pages_come_back_whatever_huge_ones_cost(
    segment: Segment, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(module, "HUGE_SECONDS", seconds)
    segment.drop()
    segment.populate(0, segment.bytes)
    assert segment.resident_bytes() == segment.bytes
    segment.drop()
    assert segment.resident_bytes() == 0


def test_pages_are_huge_as_long_as_that_is_cheap(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUGE_SECONDS", 1e9)
    segment.drop()
    segment.populate(0, segment.bytes)
    assert _mapped_huge(segment) == segment.bytes


def test_once_huge_pages_were_dear_the_rest_comes_small(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUGE_SECONDS", 1e-12)
    segment.drop()
    segment.populate(0, segment.bytes)
    assert _mapped_huge(segment) <= HUGE
    segment.drop()
    monkeypatch.setattr(module, "HUGE_SECONDS", 1e9)
    segment.drop()
    segment.populate(0, segment.bytes)
    assert _mapped_huge(segment) == segment.bytes, "what was dear once may be cheap the next time"


def test_bytes_survive_a_page_that_is_brought_back_twice(segment: Segment) -> None:
    segment.populate(0, HUGE)
    segment.view[5:9] = b"kept"
    segment.populate(0, segment.bytes)
    assert segment.view[5:9] == b"kept"
