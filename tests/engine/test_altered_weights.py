"""Weights altered on the way to a real engine: refused by tensor, never routed, and the ladder goes on.

The machine's engines alter the first bytes that each of them receives, so this must be the first wake of the session:
pytest runs the files of this folder in the order of their names.
"""

from __future__ import annotations

import pytest

from tests.engine.conftest import START_TIMEOUT
from tests.support.live import Live, by_state, same_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT)]


def test_altered_weights_are_refused_by_tensor_and_the_next_rung_serves(one: Live) -> None:
    sleeper = by_state(one.instances(), "dormant")[0]["id"]
    one.scaled(2)
    rungs = one.timeline(sleeper)["rungs"]
    assert [(r["kind"], r["ok"]) for r in rungs] == [("peer_shm", False), ("peer_tcp", True)]
    assert "tensor " in rungs[0]["reason"]
    assert "digest" in rungs[0]["reason"]
    assert same_tokens(one)
