"""Which copies a budget of host memory holds: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relight.agent.hostcopy.budget import Claim, choose
from relight.core.hosting import room_for
from relight.transfer.plan import HUGE


def test_the_least_recently_wanted_goes_first_with_the_reason() -> None:
    choice = choose([Claim("old", 60, 1), Claim("new", 60, 2), Claim("small", 40, 1)], 100)
    assert choice.kept == {"new", "small"}
    assert choice.refused == {"old": "it takes 60 bytes, and 40 of 100 are left"}


def test_nothing_fits_into_no_budget() -> None:
    assert choose([Claim("a", 1, 1)], 0).kept == frozenset()


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=12), st.integers(0, 300))
def test_what_is_kept_never_exceeds_the_budget_and_nobody_is_forgotten(sizes: list[tuple[int, int]], most: int) -> None:
    claims = [Claim(f"c{n}", size, turn) for n, (size, turn) in enumerate(sizes)]
    choice = choose(claims, most)
    assert sum(c.bytes for c in claims if c.copy in choice.kept) <= most
    assert choice.kept | set(choice.refused) == {c.copy for c in claims}


@given(st.integers(0, 1 << 45))
def test_room_is_made_for_padding_and_whole_huge_pages(weights: int) -> None:
    assert room_for(weights) >= weights + HUGE
    assert room_for(weights) % HUGE == 0
