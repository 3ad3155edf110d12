"""What the vLLM driver says of a start without starting it: private compile directories, and the key's material."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relight.agent.cache import trees
from relight.agent.cache.key import CacheKey, describe
from relight.agent.devices.base import Device
from relight.agent.engines.base import MemberContext
from relight.agent.engines.vllm import VllmDriver
from relight.core.errors import InvalidInput
from relight.core.records import Desired, InstanceAssignment, ModelSpec, Shapes
from relight.plugin.settings import read

GPU = Device("gpu0", "nvidia", "gpu0", 1 << 30)


@pytest.fixture
def driver() -> VllmDriver:
    return VllmDriver(sys.executable, (Device("cpu0", "cpu", "cpu0", 1 << 30, cores=(0,)),))


def _context(tmp_path: Path, instance: str, **changes: object) -> MemberContext:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    values = {"args": ("--max-model-len=512",), **changes}
    spec = ModelSpec("default", "m", str(model), "r1", "vllm", **values)  # type: ignore[arg-type]
    own = tmp_path / instance
    own.mkdir()
    wanted = InstanceAssignment(instance, spec.key, spec, 0, spec.members, ("cpu0",), Desired.READY)
    return MemberContext(wanted, own, own / "log", "127.0.0.1")


def _key(driver: VllmDriver, context: MemberContext) -> CacheKey:
    start = driver.compile_start(context, driver.command(context))
    assert start is not None
    return describe(start)


def test_every_compile_cache_lies_in_the_instances_own_directory(driver: VllmDriver, tmp_path: Path) -> None:
    context = _context(tmp_path, "i-1")
    env = driver.command(context).env
    for name in trees.environment("vllm", tmp_path):
        assert Path(env[name]).is_relative_to(context.directory), name


@pytest.mark.parametrize("name", sorted(trees.environment("vllm", Path("/"))))
def test_a_model_cannot_point_an_engine_at_another_compile_cache(
    driver: VllmDriver, tmp_path: Path, name: str
) -> None:  # fmt: skip
    with pytest.raises(InvalidInput, match=name):
        driver.command(_context(tmp_path, "i-1", env={name: "/shared"}))


def test_two_instances_of_one_model_have_one_key_and_other_arguments_another(
    driver: VllmDriver, tmp_path: Path
) -> None:
    first = _key(driver, _context(tmp_path, "i-1"))
    assert _key(driver, _context(tmp_path, "i-2")) == first
    other = _key(driver, _context(tmp_path, "i-3", args=("--max-model-len=1024",)))
    assert [d.field for d in first.differences(other)] == ["argument.--max-model-len"]
    ranks = _key(driver, _context(tmp_path, "i-4", devices_per_member=2))
    assert ranks.fields["ranks"] == "0-1"


def test_on_a_gpu_the_worker_captures_lazily_in_the_order_of_the_models_steps(tmp_path: Path) -> None:
    context = _context(tmp_path, "i-1")
    shapes = Shapes(1.0, {8: 30.0, 1: 2.5}, {16: 20.0})
    context = replace(context, assignment=replace(context.assignment, devices=("gpu0",), shapes=shapes))
    command = VllmDriver(sys.executable, (GPU,)).command(context)
    at = command.argv.index("--worker-cls")
    assert command.argv[at + 1] == "relight.plugin.vllm.gpu_worker.RelightGPUWorker"
    assert "--load-format" not in command.argv
    settings = read({**command.env, "RELIGHT_INSTANCE": "i-1"})
    assert settings.sizes == ((1, 2.5), (8, 30.0))


def test_what_a_models_engines_run_does_not_change_what_is_compiled(driver: VllmDriver, tmp_path: Path) -> None:
    told = _context(tmp_path, "i-1")
    told = replace(told, assignment=replace(told.assignment, shapes=Shapes(1.0, {8: 30.0}, {16: 20.0})))
    assert _key(driver, told) == _key(driver, _context(tmp_path, "i-2"))
