"""Each trap of SGLang's control API: that it is one, and that the handle does not step into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.engines.running import DEADLINE, Running, context_for, driver, running

from relight.core.clock import VirtualClock
from relight.core.errors import Conflict, InvalidInput, LocalFault, ModelDirty
from relight.core.records import OnTimeout, Rung, RungKind

pytestmark = pytest.mark.engines
Model = Callable[..., Path]
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
LONG = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 60}}
DISK = Rung(RungKind.DISK, "test")
PAUSE, RELEASE = "/pause_generation", "/release_memory_occupation"
RESUME, CONTINUE = "/resume_memory_occupation", "/continue_generation"
GRAPH_BYTES = 32 << 20
SLOW = {"token_seconds": 0.01}


async def generate(engine: Running, body: dict[str, object] = PROMPT) -> str:
    return str((await engine.careless.post("/generate", json=body)).json()["text"])


async def started(engine: Running) -> None:
    """What a start does, up to its proof."""
    await engine.handle.describe()
    await engine.handle.prove_or_record()


async def wake(engine: Running) -> None:
    await engine.handle.refill(DISK, "r1", lambda said: None)
    await engine.handle.resume()
    await engine.handle.prove()


# ---------------------------------------------------------------------- a release asserts that nothing runs


async def test_releasing_a_busy_engine_kills_it(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model(), odd=SLOW) as engine:
        request = asyncio.create_task(generate(engine, LONG))
        await engine.busy()
        assert "only when server is idle" in await engine.fatal(RELEASE)
        with pytest.raises(httpx.TransportError):
            await request


async def test_a_request_that_slips_in_before_a_sleep_survives_it_and_is_answered_after(
    tmp_path: Path, model: Model
) -> None:
    async with running(tmp_path / "i", model(), odd=SLOW) as engine:
        await started(engine)
        before = await generate(engine, LONG)
        await engine.handle.wait_idle(DEADLINE, OnTimeout.WAIT)
        request = asyncio.create_task(generate(engine, LONG))
        await engine.busy()
        await engine.handle.sleep(2)
        assert engine.alive
        await wake(engine)
        assert await request == before


# ---------------------------------------------------------------------- what is not released cannot be resumed


async def test_resuming_what_is_not_released_kills_it(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        answer = await engine.careless.post(RESUME, json={"tags": ["kv_cache"]})
        assert answer.status_code == 500
        assert "KeyError" in await engine.death()


async def test_releasing_twice_kills_it(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await engine.careless.post(PAUSE, json={"mode": "retract"})
        await engine.careless.post(RELEASE, json={"tags": ["weights"]})
        assert "released twice" in await engine.fatal(RELEASE, {"tags": ["weights"]})


async def test_sleeps_and_suspensions_said_twice_release_and_resume_each_tag_once(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await started(engine)
        for _ in range(2):
            await engine.handle.sleep(2)
        for _ in range(2):
            await engine.handle.suspend()
        await engine.handle.refill(DISK, "r1", lambda said: None)
        # The weights are back and nothing else: a wake that fails here gives back the weights alone.
        await engine.handle.suspend()
        await wake(engine)
        assert engine.alive
        assert [b["tags"] for b in engine.bodies(RELEASE)] == [["cuda_graph", "weights", "kv_cache"], ["weights"]]


async def test_a_successor_knows_what_is_released(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await started(engine)
        await engine.handle.sleep(2)
        heir = engine.again()
        await heir.suspend()
        await heir.refill(DISK, "r1", lambda said: None)
        await heir.close()
        heir = engine.again()
        await heir.resume()
        await heir.prove()
        await heir.close()
        assert engine.alive


@pytest.mark.parametrize("route", [RELEASE, RESUME])
async def test_a_call_whose_answer_nobody_heard_ends_the_engine_and_is_not_said_again(
    tmp_path: Path, model: Model, route: str
) -> None:
    async with running(tmp_path / "i", model(), odd={"hangs_in": route}) as engine:
        await started(engine)

        async def cycle() -> None:
            await engine.handle.sleep(2)
            await engine.handle.refill(DISK, "r1", lambda said: None)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cycle(), 0.5)
        heir = engine.again()
        for call in (heir.sleep(2), heir.suspend(), heir.refill(DISK, "r1", lambda said: None), heir.resume()):
            with pytest.raises(LocalFault, match="never answered"):
                await call
        await heir.close()
        assert len(engine.bodies(route)) == 1


# ---------------------------------------------------------------------- /health generates


async def test_health_runs_a_token_on_memory_that_is_gone(tmp_path: Path, model: Model) -> None:
    generates = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "true"}
    async with running(tmp_path / "i", model(), env=generates) as engine:
        await engine.careless.post(RELEASE, json={})
        with pytest.raises(httpx.TransportError):
            await engine.careless.get("/health")
        assert "illegal memory access" in await engine.death()


async def test_health_hangs_while_the_engine_is_paused_and_ready_answers_at_once(tmp_path: Path, model: Model) -> None:
    generates = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "true"}
    async with running(tmp_path / "i", model(), env=generates) as engine:
        await engine.careless.post(PAUSE, json={"mode": "retract"})
        with pytest.raises(httpx.ReadTimeout):
            await engine.careless.get("/health", timeout=0.5)
        assert (await engine.careless.get("/ready", timeout=0.5)).status_code == 503


async def test_no_cycle_asks_for_health_and_whoever_does_runs_no_token(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await started(engine)
        await engine.handle.health()
        await engine.handle.sleep(2)
        assert not any(route.startswith("/health") for route in engine.asked())
        assert (await engine.careless.get("/health")).status_code == 200
        await wake(engine)
        assert engine.alive


# ---------------------------------------------------------------------- nothing guards released memory


async def test_a_request_on_released_memory_kills_it(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await engine.careless.post(RELEASE, json={"tags": ["kv_cache"]})
        assert "illegal memory access" in await engine.fatal("/generate", PROMPT)


async def test_a_stray_request_waits_while_it_sleeps(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await started(engine)
        before = await generate(engine)
        await engine.handle.sleep(2)
        stray = asyncio.create_task(generate(engine))
        await wake(engine)
        assert await stray == before


# ---------------------------------------------------------------------- weights are garbage until they are loaded


async def test_resumed_weights_answer_wrongly_with_status_200(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        before = await generate(engine)
        await engine.careless.post(PAUSE, json={"mode": "retract"})
        for route in (RELEASE, RESUME, CONTINUE):
            await engine.careless.post(route, json={})
        assert await generate(engine) != before


async def test_nothing_resumes_without_a_refill(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await started(engine)
        await engine.handle.sleep(2)
        with pytest.raises(Conflict, match="a refill comes first"):
            await engine.handle.resume()
        with pytest.raises(LocalFault, match="level 2"):
            await engine.handle.refill(Rung(RungKind.HOST_COPY, "test"), "r1", lambda said: None)


async def test_a_checkpoint_that_changed_under_its_revision_is_not_served(tmp_path: Path, model: Model) -> None:
    path = model()
    async with running(tmp_path / "i", path) as engine:
        await started(engine)
        await engine.handle.sleep(2)
        weights = (path / "weights.bin").read_bytes()
        (path / "weights.bin").write_bytes(b"\xff" + weights[1:])
        with pytest.raises(ModelDirty, match=r"model\.layers\.0\.weight"):
            await engine.handle.refill(DISK, "r1", lambda said: None)
        with pytest.raises(Conflict):
            await engine.handle.resume()


# ---------------------------------------------------------------------- abort pauses the tokenizer alone


async def test_abort_leaves_the_scheduler_running_and_retract_holds_it(tmp_path: Path, model: Model) -> None:
    async def moves(engine: Running) -> bool:
        first = (await engine.careless.get("/v1/loads")).json()["loads"][0]["timestamp"]
        for _ in range(20):
            await engine.careless.get("/ready")
        return bool((await engine.careless.get("/v1/loads")).json()["loads"][0]["timestamp"] != first)

    async with running(tmp_path / "i", model()) as engine:
        await engine.careless.post(PAUSE, json={"mode": "abort"})
        assert await moves(engine)
        await engine.careless.post(PAUSE, json={"mode": "retract"})
        assert not await moves(engine)


async def test_the_scheduler_is_held_before_anything_is_released(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        await started(engine)
        await engine.handle.sleep(2)
        await wake(engine)
        await engine.handle.suspend()
        routes = [r for r in engine.asked() if r in (PAUSE, RELEASE)]
        modes = iter(engine.bodies(PAUSE))
        last = ""
        for route in routes:
            if route == PAUSE:
                last = next(modes)["mode"]
            else:
                assert last == "retract"


# ---------------------------------------------------------------------- the admin key


async def test_control_routes_need_the_key_and_the_handle_has_it(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        for route in (PAUSE, RELEASE, RESUME, CONTINUE, "/weights_checker", "/update_weights_from_disk"):
            got = await engine.careless.post(route, json={}, headers={"Authorization": "Bearer guessed"})
            assert got.status_code == 401, route
        await started(engine)
        await engine.handle.sleep(2)
        await wake(engine)


async def test_the_key_is_in_no_command_line_and_in_nobody_elses_file(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model()) as engine:
        path = engine.context.directory / "sglang.yaml"
        key = path.read_text().split()[1]
        assert key not in command_line(engine.process.pid)
        assert path.stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------------- it gives way silently


async def test_loading_from_a_running_instance_gives_way_to_the_disk_without_a_word(
    tmp_path: Path, model: Model
) -> None:
    told = ["--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine"]
    context = context_for(tmp_path / "i", model(), *told)
    with pytest.raises(InvalidInput, match="no --load-format"):
        await driver().command(context)


async def test_an_engine_that_loaded_otherwise_than_it_was_told_is_refused(tmp_path: Path, model: Model) -> None:
    async with running(tmp_path / "i", model(), odd={"loads_by": "dummy"}) as engine:
        with pytest.raises(LocalFault, match="'dummy' instead of 'auto'"):
            await engine.handle.describe()


# ---------------------------------------------------------------------- an open port is no sign of life


async def test_a_scheduler_that_hangs_is_found_although_its_server_answers(tmp_path: Path, model: Model) -> None:
    clock = VirtualClock()
    async with running(tmp_path / "i", model(), clock=clock, odd={"hang_after": 1}) as engine:
        await generate(engine)
        assert (await engine.handle.health()).alive
        stuck = asyncio.create_task(generate(engine))
        await engine.busy()
        clock.advance(31.0)
        said = await engine.handle.health()
        assert not said.alive
        assert "nothing moved" in said.reason
        assert (await engine.careless.get("/ready")).status_code == 200
        stuck.cancel()


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def held(pid: int) -> int:
    """Bytes of memory of the process's own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def test_graphs_go_with_the_rest_because_the_engine_is_told_so(tmp_path: Path, model: Model) -> None:
    async def kept(directory: Path, **env: str) -> int:
        # Little else that moves: what is left of it says whether graphs are among it.
        async with running(directory, model(size=1 << 16), env=env) as engine:
            await started(engine)
            await engine.handle.sleep(2)
            return held(engine.process.pid)

    told = await kept(tmp_path / "told")
    assert await kept(tmp_path / "untold", SGLANG_MEMORY_SAVER_CUDA_GRAPH="false") > told + GRAPH_BYTES // 2
