"""How fast one engine may be read: the host's limit and the model's hold both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relight.agent.member import Member
from relight.agent.stages.common import Tools
from relight.core.clock import VirtualClock
from relight.core.records import Desired, InstanceAssignment, Mode, ModelSpec

CLOCK = VirtualClock()
NOBODY: Any = None


def member(directory: Path, rate: int | None) -> Member:
    spec = ModelSpec("n", "m", "/m", "r1", "stub", source_rate=rate)
    assigned = InstanceAssignment("i", spec.key, spec, 0, 1, ("d0",), Desired.READY, 2, Mode.COLD, "r1")
    return Member(assigned, directory, directory / "log", CLOCK, lambda _: None, lambda _: None, 1, 1, 0.0)


@pytest.mark.parametrize(
    ("host", "model", "both"), [(None, None, None), (9, None, 9), (None, 5, 5), (9, 5, 5), (3, 5, 3)]
)
def test_of_two_limits_the_lower_one_holds(
    tmp_path: Path, host: int | None, model: int | None, both: int | None
) -> None:
    tools = Tools(CLOCK, {}, NOBODY, NOBODY, NOBODY, "127.0.0.1", False, source_rate=host)
    assert tools.context(member(tmp_path, model)).source_rate == both
