"""Checkpoints are read ahead within the budget, told as far as they are, and given up when nobody wants them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relight.agent.hostcopy.prefetch import STEP, Prefetcher, files_of, read_ahead
from relight.core.errors import LocalFault
from relight.core.records import Prefetch, PrefetchReport

WEIGHTS = STEP + 5


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "b.safetensors").write_bytes(bytes(WEIGHTS))
    (tmp_path / "a.bin").write_bytes(bytes(7))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "d.safetensors").mkdir()
    return str(tmp_path)


def test_only_files_of_weights_are_read_in_their_order(checkpoint: str) -> None:
    assert [(f.path.name, f.bytes) for f in files_of(checkpoint)] == [("a.bin", 7), ("b.safetensors", WEIGHTS)]


@pytest.mark.parametrize("uri", ["/nowhere", "", "a\0b"])
def test_a_place_without_weights_is_refused_by_name(uri: str, tmp_path: Path) -> None:
    with pytest.raises(LocalFault):
        files_of(uri or str(tmp_path))


@pytest.mark.parametrize("most", [0, 5, STEP, 1 << 40])
def test_never_more_is_read_than_the_budget_has_left(checkpoint: str, most: int) -> None:
    seen: list[int] = []
    assert read_ahead(files_of(checkpoint), most, lambda: False, seen.append) == min(most, WEIGHTS + 7)
    assert seen == sorted(seen)


def test_reading_ends_when_nobody_wants_it(checkpoint: str) -> None:
    seen: list[int] = []
    assert read_ahead(files_of(checkpoint), 1 << 40, lambda: bool(seen), seen.append) == 7


def test_a_file_that_vanished_is_named(checkpoint: str) -> None:
    files = files_of(checkpoint)
    files[0].path.unlink()
    with pytest.raises(LocalFault, match=r"a\.bin"):
        read_ahead(files, 1 << 40, lambda: False, lambda _: None)


async def read(room: int, *wanted: Prefetch) -> tuple[PrefetchReport, ...]:
    """What is reported once all that is wanted was read."""
    ahead = Prefetcher(lambda: room, lambda: None)
    ahead.hear(wanted)
    for one in wanted:
        await asyncio.wait_for(ahead.read(one), 30)
    return ahead.reports()


async def test_a_second_checkpoint_gets_what_the_first_left_of_the_budget(checkpoint: str) -> None:
    first, second = (Prefetch(f"default/{n}", "r1", checkpoint) for n in "ab")
    whole = WEIGHTS + 7
    done = await read(whole + 100, first, second)
    assert done[0] == PrefetchReport("default/a", "r1", whole, whole)
    assert (done[1].bytes, done[1].reason) == (100, "the budget has 100 bytes left for it")


async def test_what_cannot_be_read_is_reported_with_the_reason() -> None:
    (report,) = await read(1 << 30, Prefetch("default/a", "r1", "/nowhere"))
    assert "/nowhere" in report.reason


async def test_what_is_not_named_any_more_is_forgotten(checkpoint: str) -> None:
    ahead = Prefetcher(lambda: 1 << 30, lambda: None)
    wanted = Prefetch("default/a", "r1", checkpoint)
    ahead.hear([wanted])
    await ahead.read(wanted)
    ahead.hear([])
    assert ahead.reports() == ()
