"""What the SGLang driver refuses of a model's arguments without starting anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from relight.agent.devices.base import Device
from relight.agent.engines.base import MemberContext
from relight.agent.engines.sglang import SglangDriver
from relight.core.errors import InvalidInput
from relight.core.records import Desired, InstanceAssignment, ModelSpec

if TYPE_CHECKING:
    from relight.agent.surroundings import Surroundings


class Around:
    """Where engines would run, which nobody asks here."""

    here = True
    variables: Mapping[str, str] = {}

    async def ask(self, python: str, question: Mapping[str, Any]) -> Any:
        return {"model": {}}


async def _refused(tmp_path: Path, *args: str) -> str:
    device = Device("gpu0", "nvidia", "gpu0", 1 << 30, "H200", visible_as="GPU-1")
    driver = SglangDriver((device,), cast("Surroundings", Around()), sys.executable)
    spec = ModelSpec("default", "m", "/model", "r1", "sglang", args=args)
    wanted = InstanceAssignment("i-1", spec.key, spec, 0, 1, ("gpu0",), Desired.READY)
    with pytest.raises(InvalidInput) as caught:
        await driver.command(MemberContext(wanted, tmp_path, tmp_path / "log", "127.0.0.1"))
    return str(caught.value)


@pytest.mark.parametrize("args", [("--tp", "2"), ("--tp=2",), ("--dp", "2"), ("--ep", "2")])
async def test_the_usual_short_forms_that_spread_an_engine_are_refused_too(tmp_path: Path, args: tuple[str]) -> None:
    assert "Relight sets it" in await _refused(tmp_path, *args)


async def test_a_key_that_is_refused_is_not_repeated(tmp_path: Path) -> None:
    told = await _refused(tmp_path, "--api-key=sk-1234")
    assert "no --api-key: Relight sets it" in told
    assert "sk-1234" not in told
