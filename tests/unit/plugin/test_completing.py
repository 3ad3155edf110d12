"""What a lazy start left out is done piece by piece."""

from __future__ import annotations

import pytest

from relight.plugin.vllm.completing import Completing


def test_each_call_does_one_piece_and_says_how_many_are_left() -> None:
    done: list[int] = []
    worker = Completing()
    worker._relight_rest = tuple(lambda n=n: done.append(n) for n in range(2))
    assert [worker.relight_complete() for _ in range(3)] == [1, 0, 0]
    assert done == [0, 1]


def test_a_piece_that_fails_is_tried_again_by_the_next_call() -> None:
    worker, tries = Completing(), iter((True, False))

    def piece() -> None:
        if next(tries):
            raise RuntimeError("no memory")

    worker._relight_rest = (piece,)
    with pytest.raises(RuntimeError):
        worker.relight_complete()
    assert worker.relight_complete() == 0
