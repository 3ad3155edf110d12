"""Leases: one holder per key; a death ends it by time alone."""

from __future__ import annotations

import pytest

from relight.agent.cache.lease import LONGEST, MOST, Leases
from relight.core.errors import Conflict, InvalidInput


def test_the_first_has_it_until_it_runs_out_and_the_next_is_told_who() -> None:
    leases = Leases()
    assert leases.acquire("k", "a", "1", 60, now=0).token == "1"
    assert leases.acquire("k", "b", "2", 60, now=59.9).holder == "a"
    assert leases.acquire("k", "b", "2", 60, now=60).holder == "b"


def test_a_holder_renews_by_asking_again() -> None:
    leases = Leases()
    leases.acquire("k", "a", "1", 60, now=0)
    leases.acquire("k", "a", "1", 60, now=50)
    assert leases.acquire("k", "b", "2", 60, now=100).holder == "a"


def test_only_the_holder_releases_and_only_its_own() -> None:
    leases = Leases()
    leases.acquire("k", "a", "1", 60, now=0)
    assert not leases.release("k", "2", now=1)
    assert leases.release("k", "1", now=1)
    assert not leases.release("k", "1", now=1)
    assert leases.current("k", now=1) is None


def test_a_late_holder_does_not_take_away_the_next_ones_lease() -> None:
    leases = Leases()
    leases.acquire("k", "a", "1", 60, now=0)
    leases.acquire("k", "b", "2", 60, now=61)
    assert not leases.release("k", "1", now=62)
    assert leases.acquire("k", "a", "1", 60, now=63).holder == "b"


@pytest.mark.parametrize("seconds", [0, -1, LONGEST + 1, float("nan"), float("inf")])
def test_a_lease_has_an_end_within_reason(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="seconds"):
        Leases().acquire("k", "a", "1", seconds, now=0)


def test_what_ran_out_makes_room() -> None:
    leases = Leases()
    for n in range(MOST):
        leases.acquire(f"k{n}", "a", "1", 60, now=0)
    with pytest.raises(Conflict, match="leases"):
        leases.acquire("one more", "a", "1", 60, now=1)
    assert leases.acquire("one more", "a", "1", 60, now=61).holder == "a"
