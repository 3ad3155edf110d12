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
from relight.agent.engines.vllm_handle import VllmHandle
from relight.agent.engines.vllm_outside import VllmOutsideHandle
from relight.core.errors import InvalidInput, LocalFault
from relight.core.records import Adapter, Desired, Guardians, InstanceAssignment, Mode, ModelSpec, Shapes
from relight.plugin import look
from relight.plugin.settings import read

if TYPE_CHECKING:
    from relight.agent.surroundings import Surroundings

GPU = Device("gpu0", "nvidia", "gpu0", 1 << 30, "H200", visible_as="GPU-1")
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


KUNLUN = Device("x0", "kunlun", "x0", 96 << 30, "P800 OAM", visible_as="3")


class Elsewhere(Around):
    """Where engines run some releases are installed that are not here."""

    def __init__(self, **versions: str) -> None:
        self._versions = {name.replace("_", "-"): value for name, value in versions.items()}

    async def ask(self, python: str, question: Mapping[str, Any]) -> Any:
        found = dict(await super().ask(python, question))
        if "versions" in found:
            found["versions"] = {**found["versions"], **self._versions}
        return found


def _on(device: Device, **versions: str) -> VllmDriver:
    return VllmDriver((device,), cast("Surroundings", Elsewhere(**versions)), sys.executable)


def _there(tmp_path: Path, device: Device, instance: str = "i-1", **changes: object) -> MemberContext:
    context = _context(tmp_path, instance, **{"args": CACHE, **changes})
    return replace(context, assignment=replace(context.assignment, devices=(device.id,)))


async def test_a_start_on_a_gpu_depends_on_no_neighbour_and_can_sleep(tmp_path: Path) -> None:
    command = await _on(GPU).command(_there(tmp_path, GPU))
    argv = list(command.argv)
    assert "--enable-sleep-mode" in argv
    # Only compared with what is free: a start beside engines that are awake is not refused for it.
    assert float(argv[argv.index("--gpu-memory-utilization") + 1]) <= 0.02
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert command.env["VLLM_PLUGINS"] == "relight"


async def test_weights_on_a_gpu_are_moved_from_inside_and_on_kunlun_by_vllms_own_calls(tmp_path: Path) -> None:
    context = _there(tmp_path, GPU)
    context = replace(context, assignment=replace(context.assignment, mode=Mode.NORMAL))
    await _on(GPU).command(context)
    handle = _on(GPU).handle(context)
    assert isinstance(handle, VllmHandle)
    # vLLM loads the weights of a start by itself there: no rung is waited for.
    assert not await handle.wait_empty(5.0, lambda said: None)
    context = _there(tmp_path, KUNLUN, "i-2")
    await _on(KUNLUN, vllm_kunlun="0.25.1").command(context)
    assert isinstance(_on(KUNLUN, vllm_kunlun="0.25.1").handle(context), VllmOutsideHandle)


@pytest.mark.parametrize("device", [GPU, KUNLUN])
async def test_without_its_bytes_of_cache_a_start_on_a_shared_device_is_refused(tmp_path: Path, device: Device) -> None:
    driver = _on(device, vllm_kunlun="0.25.1")
    with pytest.raises(InvalidInput, match="--kv-cache-memory-bytes=BYTES"):
        await driver.command(_there(tmp_path, device, args=()))


@pytest.mark.parametrize(
    "argument", ["--gpu-memory-utilization=0.9", "--gpu-memory-util=0.9", "--worker_cls=mine", "--enable-sleep-mode"]
)
async def test_what_relight_sets_itself_is_refused_however_it_is_spelled(tmp_path: Path, argument: str) -> None:
    with pytest.raises(InvalidInput, match="Relight sets it"):
        await _on(GPU).command(_there(tmp_path, GPU, args=(*CACHE, argument)))


async def test_what_is_compiled_for_one_accelerator_has_another_key_than_for_another(tmp_path: Path) -> None:
    other = replace(GPU, model_name="H20")
    first = await _key(_on(GPU), _there(tmp_path, GPU))
    second = await _key(_on(other), _there(tmp_path, other, "i-2"))
    assert [d.field for d in first.differences(second)] == ["device.accelerator"]


async def test_on_kunlun_its_own_plugin_comes_first_and_graphs_are_captured_by_pieces(tmp_path: Path) -> None:
    said = ("--compilation-config", '{"splitting_ops": ["vllm.unified_attention"]}')
    context = _there(tmp_path, KUNLUN, args=(*CACHE, *said))
    driver = _on(KUNLUN, vllm_kunlun="0.25.1")
    command = await driver.command(context)
    argv = list(command.argv)
    told = json.loads(argv[argv.index("--compilation-config") + 1])
    assert told == {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["vllm.unified_attention"]}
    assert argv.count("--compilation-config") == 1
    assert "--worker-cls" not in argv
    assert command.env["VLLM_PLUGINS"].split(",")[0] == "kunlun"
    assert "relight" not in command.env["VLLM_PLUGINS"].split(",")
    assert command.env["XPU_VISIBLE_DEVICES"] == command.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert command.env["XMLIR_FORCE_USE_XPU_GRAPH"] == "1"
    assert await driver.compile_start(context, command) is None
    assert driver.zygote(tmp_path) is None
    assert "before it" in driver.no_zygote


async def test_whole_graphs_are_refused_on_kunlun(tmp_path: Path) -> None:
    said = '--compilation-config={"cudagraph_mode": "FULL"}'
    with pytest.raises(InvalidInput, match="PIECEWISE"):
        await _on(KUNLUN, vllm_kunlun="0.25.1").command(_there(tmp_path, KUNLUN, args=(*CACHE, said)))


async def test_a_plugin_that_gives_no_memory_back_starts_replicas_and_no_guardians(tmp_path: Path) -> None:
    driver = _on(KUNLUN, vllm_kunlun="0.11.1")
    context = _there(tmp_path, KUNLUN)
    assert "--enable-sleep-mode" not in (await driver.command(context)).argv
    with pytest.raises(LocalFault, match=r"guardians need 0\.25\.1"):
        await driver.handle(context).sleep(2)
    with pytest.raises(InvalidInput, match=r"guardians\.replicas"):
        await driver.command(_there(tmp_path, KUNLUN, "i-2", guardians=Guardians(replicas=1)))


async def test_adapters_on_a_gpu_and_guardians_exclude_each_other(tmp_path: Path) -> None:
    adapters = (Adapter("french", "/a/french"),)
    assert "--enable-lora" in (await _on(GPU).command(_there(tmp_path, GPU, adapters=adapters))).argv
    with pytest.raises(InvalidInput, match="gone after a wake"):
        await _on(GPU).command(_there(tmp_path, GPU, "i-2", adapters=adapters, guardians=Guardians(replicas=1)))
