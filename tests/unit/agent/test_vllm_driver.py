"""What the vLLM driver says of a start without starting it: private compile directories, and the key's material."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from relight.agent.cache import trees
from relight.agent.cache.key import CacheKey, describe
from relight.agent.devices.base import Device
from relight.agent.engines.base import MemberContext
from relight.agent.engines.vllm import VllmDriver
from relight.core.errors import InvalidInput
from relight.core.records import Adapter, Desired, InstanceAssignment, ModelSpec, Shapes
from relight.plugin import look
from relight.plugin.settings import read

if TYPE_CHECKING:
    from relight.agent.surroundings import Surroundings

GPU = Device("gpu0", "nvidia", "gpu0", 1 << 30, "H200")
CACHE = ("--kv-cache-memory-bytes=1073741824",)


class Around:
    """Answers as where engines run would, and is here."""

    here = True
    variables: Mapping[str, str] = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}

    async def ask(self, python: str, question: Mapping[str, Any]) -> Any:
        return look.answer(dict(question))


def _driver(device: Device) -> VllmDriver:
    return VllmDriver((device,), cast("Surroundings", Around()), sys.executable)


@pytest.fixture
def driver() -> VllmDriver:
    return _driver(Device("cpu0", "cpu", "cpu0", 1 << 30, cores=(0,)))


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


async def _key(driver: VllmDriver, context: MemberContext) -> CacheKey:
    start = await driver.compile_start(context, await driver.command(context))
    assert start is not None
    return describe(start)


async def test_every_compile_cache_lies_in_the_instances_own_directory(driver: VllmDriver, tmp_path: Path) -> None:
    context = _context(tmp_path, "i-1")
    env = (await driver.command(context)).env
    for name in trees.environment("vllm", tmp_path):
        assert Path(env[name]).is_relative_to(context.directory), name


@pytest.mark.parametrize("name", sorted(trees.environment("vllm", Path("/"))))
async def test_a_model_cannot_point_an_engine_at_another_compile_cache(
    driver: VllmDriver, tmp_path: Path, name: str
) -> None:  # fmt: skip
    with pytest.raises(InvalidInput, match=name):
        await driver.command(_context(tmp_path, "i-1", env={name: "/shared"}))


async def test_two_instances_of_one_model_have_one_key_and_other_arguments_another(
    driver: VllmDriver, tmp_path: Path
) -> None:
    first = await _key(driver, _context(tmp_path, "i-1"))
    assert await _key(driver, _context(tmp_path, "i-2")) == first
    other = await _key(driver, _context(tmp_path, "i-3", args=("--max-model-len=1024",)))
    assert [d.field for d in first.differences(other)] == ["argument.--max-model-len"]
    ranks = await _key(driver, _context(tmp_path, "i-4", devices_per_member=2))
    assert ranks.fields["ranks"] == "0-1"


async def test_on_a_gpu_the_worker_captures_lazily_in_the_order_of_the_models_steps(tmp_path: Path) -> None:
    context = _context(tmp_path, "i-1", args=CACHE)
    shapes = Shapes(1.0, {8: 30.0, 1: 2.5}, {16: 20.0})
    context = replace(context, assignment=replace(context.assignment, devices=("gpu0",), shapes=shapes))
    command = await _driver(GPU).command(context)
    at = command.argv.index("--worker-cls")
    assert command.argv[at + 1] == "relight.plugin.vllm.gpu_worker.RelightGPUWorker"
    assert "--load-format" not in command.argv
    settings = read({**command.env, "RELIGHT_INSTANCE": "i-1"})
    assert settings.sizes == ((1, 2.5), (8, 30.0))


async def test_what_a_models_engines_run_does_not_change_what_is_compiled(driver: VllmDriver, tmp_path: Path) -> None:
    told = _context(tmp_path, "i-1")
    told = replace(told, assignment=replace(told.assignment, shapes=Shapes(1.0, {8: 30.0}, {16: 20.0})))
    assert await _key(driver, told) == await _key(driver, _context(tmp_path, "i-2"))


async def test_an_engine_has_what_its_surroundings_give_and_its_model_has_the_last_word(
    driver: VllmDriver, tmp_path: Path
) -> None:
    env = (await driver.command(_context(tmp_path, "i-1", env={"LD_LIBRARY_PATH": "/own"}))).env
    assert (env["PATH"], env["LD_LIBRARY_PATH"]) == ("/usr/bin", "/own")
    zygote = driver.zygote(tmp_path)
    assert zygote is not None
    assert zygote.command.env["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib64"


async def test_a_model_that_is_not_where_engines_run_is_refused_by_name(driver: VllmDriver, tmp_path: Path) -> None:
    context = _context(tmp_path, "i-1")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"config\.json"):
        await driver.command(context)


async def test_adapters_are_loaded_at_the_start_and_all_of_them_have_room(driver: VllmDriver, tmp_path: Path) -> None:
    adapters = (Adapter("french", "/a/french"), Adapter("legal", "/a/legal"))
    argv = (await driver.command(_context(tmp_path, "i-1", adapters=adapters))).argv
    at = argv.index("--lora-modules")
    assert [json.loads(word) for word in argv[at + 1 : at + 3]] == [
        {"name": "french", "path": "/a/french"}, {"name": "legal", "path": "/a/legal"},
    ]  # fmt: skip
    assert {"--enable-lora", "--max-loras=2"} <= set(argv)
    own = ("--max-loras=1",)
    argv = (await driver.command(_context(tmp_path, "i-2", adapters=adapters, args=own))).argv
    assert [word for word in argv if word.startswith("--max-loras")] == list(own)


async def test_experts_are_dealt_over_the_devices_that_there_are(driver: VllmDriver, tmp_path: Path) -> None:
    argv = (await driver.command(_context(tmp_path, "i-1", devices_per_member=2, expert_parallel=True))).argv
    assert "--enable-expert-parallel" in argv
    argv = (await driver.command(_context(tmp_path, "i-2", expert_parallel=True))).argv
    assert "--enable-expert-parallel" not in argv
