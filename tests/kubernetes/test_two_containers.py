"""A slot pod's two containers with a filesystem each: the agent sees nothing of the engine's image, and vLLM serves.

The engine's image has no Relight in it. What it needs comes by `relight-inject`, through the directory that both share.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio
import pytest
from tests.support import agent
from tests.support.live import EAGER, ENGINE_PYTHON, ROOT

from relight.agent.inject import inject
from relight.agent.procfs import Procfs
from relight.core.records import Desired, Mode, Rung, RungKind
from relight.core.states import State
from relight.protos.relight.v1 import fleet_pb2_grpc

START_TIMEOUT = 400
pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(START_TIMEOUT)]
DISK = (Rung(RungKind.DISK, "its own directory"),)


@dataclass
class Image:
    """`root` is an empty directory to everybody but those inside; `outside` is what they see there."""

    root: Path
    outside: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """An interpreter with vLLM and without Relight, and a model."""
    assert ENGINE_PYTHON.exists(), "no engine environment: run `make setup-engine`"
    outside, root = tmp_path / "outside", tmp_path / "image"
    root.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", outside], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(outside)}))
    told = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([ENGINE_PYTHON, "-c", told], check=True, capture_output=True, text=True, timeout=60)
    # The engine environment of a checkout points at the part that has no Relight.
    shutil.copy(Path(own.stdout.strip()) / "engine-base.pth", site)
    script = ROOT / "scripts" / "make_tiny_model.py"
    subprocess.run([str(ENGINE_PYTHON), str(script), str(outside / "model")], check=True, timeout=120)
    asked = [outside / "bin" / "python", "-c", "import relight.plugin"]
    done = subprocess.run(asked, capture_output=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]})
    assert b"ModuleNotFoundError" in done.stderr
    return Image(root, outside)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real engines start in minutes where stubs do in milliseconds."""
    monkeypatch.setattr(agent, "DEADLINE", float(START_TIMEOUT))


@pytest.fixture
async def slot(image: Image) -> AsyncIterator[agent.Slot]:
    """A supervisor in the engine's container, and beside it an agent that shares one directory with it."""
    server, fleet = grpc.aio.server(), agent.Fleet()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    fleet.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    # Short: the kernel allows 107 bytes for a socket's path.
    with tempfile.TemporaryDirectory(prefix="rt-") as name:
        shared = Path(name)
        inject(shared)
        config = {
            "slot": "a", "controller_address": f"127.0.0.1:{fleet.port}", "token": agent.TOKEN,
            "state_dir": str(shared / "state"), "supervisor_beside": True,
            "devices": [{"id": "cpu-0", "memory_bytes": 4 << 30}], "engines": {"vllm": {"python": image.python}},
        }  # fmt: skip
        own = "" if os.geteuid() == 0 else "--map-root-user"
        script = f"mount --bind {image.outside} {image.root} && exec {shared}/bin/relight-supervisor {shared}/state"
        supervisor = await asyncio.create_subprocess_exec(
            "unshare", "--mount", *own.split(), "sh", "-c", script, stdin=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "RELIGHT_PYTHON": image.python, "FROM_THE_IMAGE": "yes"},
        )  # fmt: skip
        made = agent.Slot(fleet, shared, config)
        try:
            await made.up()
            yield made
        finally:
            await made.down()
            supervisor.terminate()
            async with asyncio.timeout(30):
                await supervisor.wait()
            await server.stop(0)


async def test_an_engine_of_an_image_without_relight_starts_sleeps_wakes_and_answers(
    slot: agent.Slot, image: Image
) -> None:
    assert not list(image.root.iterdir()), "the agent must not see the engine's image"
    report = await slot.fleet.until(lambda r: "vllm" in r.engines)
    assert report.engines["vllm"].startswith("0.")
    model = slot.instance("i-1", Desired.READY, mode=Mode.NORMAL, rungs=DISK)
    spec = replace(
        model.spec, uri=str(image.root / "model"), engine="vllm", args=(*EAGER, "--kv-cache-memory-bytes=33554432")
    )
    slot.want(replace(model, spec=spec, deadline_seconds=START_TIMEOUT))
    ready = await slot.until("i-1", State.READY)
    assert ready.start is not None
    assert "zygote" in ready.start.process
    assert Procfs().environ(ready.pid)["FROM_THE_IMAGE"] == "yes"
    assert ready.endpoint is not None
    before = await agent.complete(ready.endpoint.url, ready.endpoint.served_name, max_tokens=8, temperature=0)
    assert before.status_code == 200
    slot.change("i-1", Desired.DORMANT, level=2)
    await slot.until("i-1", State.DORMANT)
    since = len(slot.fleet.reports)
    slot.change("i-1", Desired.READY, mode=Mode.GUARDIAN)
    woken = await slot.until("i-1", State.READY, since=since)
    assert woken.endpoint is not None
    after = await agent.complete(woken.endpoint.url, woken.endpoint.served_name, max_tokens=8, temperature=0)
    assert after.json()["choices"] == before.json()["choices"]


async def test_a_model_that_the_engines_container_lacks_is_refused_by_name(slot: agent.Slot, image: Image) -> None:
    model = slot.instance("i-1", Desired.READY, mode=Mode.NORMAL, rungs=DISK)
    slot.want(replace(model, spec=replace(model.spec, uri=str(image.root / "absent"), args=(), engine="vllm")))
    failed = await slot.until("i-1", State.FAILED)
    assert failed.failure is not None
    assert "config.json" in failed.failure.reason
    assert failed.failure.retry_after is None
