"""A real controller and real agents with stub engines that compile: what one start made, the next one finds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relight.controller.cli import pki
from relight.core.clock import SystemClock
from support.agent import Slot
from support.controlplane import TOKENS, Running, model

DEADLINE = 40.0
MODEL = "/api/v1/namespaces/default/models/m"
CHECKOUT = {"PYTHONPATH": str(Path(__file__).resolve().parents[3] / "src")}
"""Engines inherit nothing: this is whose stubs they are."""


class Fleet:
    """One controller in this process, agents as processes."""

    def __init__(self, root: Path, running: Running, **settings: Any) -> None:
        """`settings` are those of every agent."""
        self.root, self.running, self.slots, self.settings = root, running, dict[str, Slot](), settings

    async def add(self, name: str, **changes: Any) -> Slot:
        directory = self.root / name
        directory.mkdir()
        config = {
            "slot": name,
            "controller_address": self.running.rpc,
            "token": TOKENS["agent"],
            "state_dir": str(directory / "state"),
            "devices": [{"id": "cpu-0", "memory_bytes": 1 << 30}],
            "engines": {"stub": {}},
            "health_seconds": 0.2,
            **self.settings,
            **changes,
        }
        self.slots[name] = Slot(SimpleNamespace(port=0), directory, config)
        await self.slots[name].up()
        return self.slots[name]

    async def until(self, ask: Callable[[], Any], holds: Callable[[Any], Any]) -> Any:
        """What `ask` says once `holds` is true of it; each look is a round trip."""
        said = None
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    said = await ask()
                    if holds(said):
                        return said
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(said) from None

    async def ring(self, *names: str) -> None:
        """Returns when the ring has exactly these nodes, as the command line would see it."""

        async def nodes() -> set[str]:
            present = self.running.controller.reconciler.rings.of()
            return set(present.nodes) if present else set()

        await self.until(nodes, lambda found: found == set(names))

    async def scale(self, replicas: int) -> None:
        ended = await self.running.ended(await self.running.scale(replicas))
        assert ended["state"] == "done", ended

    async def starts(self, count: int) -> dict[str, dict[str, Any]]:
        """What the ring did for each ready instance, by slot, once all of `count` say."""

        async def records() -> dict[str, dict[str, Any]]:
            found = {}
            for instance in await self.running.instances():
                if instance["state"] != "ready":
                    continue
                reply = await self.running.client.get(f"/api/v1/instances/{instance['id']}/timeline")
                if reply.status_code == 200 and reply.json()["cache"]:
                    found[instance["members"][0]["slot"]] = reply.json()
            return found

        return await self.until(records, lambda found: len(found) == count)

    async def bundles(self) -> list[dict[str, Any]]:
        reply = await self.running.client.get("/api/v1/cache/bundles")
        assert reply.status_code == 200, reply.text
        return reply.json()["items"]


@asynccontextmanager
async def made_of(controller: dict[str, Any], agents: dict[str, Any], mode: str = "normal") -> AsyncIterator[Fleet]:
    """A controller with one model of this mode, and agents as they are added; all end with the test."""
    with tempfile.TemporaryDirectory(prefix="rl-") as root:
        spec = model(mode=mode, args=['compiles="graph"'], env=CHECKOUT)
        running = await Running.start(Path(root), models=[spec], **controller)
        made = Fleet(Path(root), running, **agents)
        try:
            yield made
        finally:
            for slot in made.slots.values():
                await slot.down()
                for log in slot.directory.rglob("*.log"):
                    print(f"--- {log}\n{log.read_text()[-3000:]}")
            await running.stop()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with made_of({}, {}) as made:
        yield made


async def test_a_second_start_on_another_node_loads_what_the_first_compiled(fleet: Fleet) -> None:
    await fleet.add("a")
    await fleet.add("b")
    await fleet.ring("a", "b")
    await fleet.scale(1)
    ((first, cold),) = (await fleet.starts(1)).items()
    assert (cold["cache"]["verdict"], cold["cache"]["compiled"]) == ("compiled", 1)
    assert sorted(cold["cache"]["published"]) == ["a", "b"], cold["cache"]
    await fleet.scale(2)
    ((_, warm),) = ((slot, t) for slot, t in (await fleet.starts(2)).items() if slot != first)
    found = warm["cache"]
    assert (found["verdict"], found["selected"], found["hit"], found["compiled"]) == ("hit", True, True, 0), found
    assert found["key"] == cold["cache"]["key"]
    assert found["bundle"] == cold["cache"]["bundle"]
    assert found["installed"] == 1
    (phase,) = (p for p in warm["phases"] if p["name"] == "cache")
    assert phase["detail"].startswith("1 files")

    async def metrics() -> str:
        return (await fleet.running.client.get("/metrics")).text

    second = "b" if first == "a" else "a"
    text = await fleet.until(metrics, lambda t: f'relight_cache_starts_total{{outcome="hit",slot="{second}"}} 1.0' in t)
    assert f'relight_cache_compiles_total{{slot="{first}"}} 1.0' in text
    assert f'relight_cache_bundles{{slot="{first}"}} 1.0' in text
    # The secret that grants are signed with is nobody's to see.
    key = fleet.running.controller.reconciler.fleet.seen["a"].report.cache.grant_key
    for path in ("/api/v1/slots", "/api/v1/instances", "/api/v1/cache/bundles", "/metrics"):
        assert key not in (await fleet.running.client.get(path)).text
    assert key not in repr(fleet.running.controller.reconciler.snapshot())


async def test_with_data_tls_bundles_travel_under_certificates_of_the_fleet(tmp_path: Path) -> None:
    pki.make(tmp_path, ("controller", "agent"), SystemClock())

    def files(name: str) -> dict[str, str]:
        paths = {"certificate": f"{name}.pem", "private_key": f"{name}.key", "authority": "ca.pem"}
        return {field: str(tmp_path / path) for field, path in paths.items()}

    controller = {"grpc": {"port": 0, "tls": files("controller")}}
    async with made_of(controller, {"tls": files("agent"), "data_tls": True}) as fleet:
        await fleet.add("a")
        await fleet.add("b")
        await fleet.ring("a", "b")
        present = fleet.running.controller.reconciler.rings.of()
        assert {n.address.partition(":")[0] for n in present.nodes.values()} == {"tls"}
        await fleet.scale(1)
        await fleet.starts(1)
        await fleet.scale(2)
        assert sorted(t["cache"]["verdict"] for t in (await fleet.starts(2)).values()) == ["compiled", "hit"]
        assert len(await fleet.bundles()) == 1


async def test_the_command_line_lists_shows_and_compares_keys(fleet: Fleet) -> None:
    await fleet.add("a")
    await fleet.ring("a")
    await fleet.scale(1)
    await fleet.starts(1)
    spec = model(mode="normal", args=['compiles="another"'], env=CHECKOUT, replicas=1)
    body = {k: v for k, v in spec.items() if k not in ("name", "namespace")}
    await fleet.scale(0)
    assert (await fleet.running.client.put(MODEL, json=body, headers={"If-Match": "*"})).status_code == 200
    first, second = sorted(b["key"] for b in await fleet.until(fleet.bundles, lambda b: len(b) == 2))

    async def relight(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "relight.controller.cli", "cache", *words, "--server", fleet.running.base]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "RELIGHT_TOKEN": TOKENS["operator"]},
        )  # fmt: skip

    (node,) = json.loads((await relight("nodes", "-o", "json")).stdout)
    assert (node["slot"], node["bundles"], node["compiles"]) == ("a", 2, 2)
    assert node["signer"] in (await relight("nodes")).stdout
    listed = await relight("list")
    assert (listed.returncode, first in listed.stdout, "/models/m" in listed.stdout) == (0, True, True), listed
    assert [b["key"] for b in json.loads((await relight("list", "-o", "json")).stdout)] == [first, second]
    shown = await relight("show", first[:8])
    assert "version.stub" in shown.stdout, shown
    assert json.loads((await relight("show", first[:8], "-o", "json")).stdout)["nodes"] == ["a"]
    differing = json.loads((await relight("diff", first[:8], second[:8], "-o", "json")).stdout)
    assert [d["component"] for d in differing] == ["argument.--compiles"]
    assert "graph" in (await relight("diff", first[:8], second[:8])).stdout
    assert (await relight("diff", first, first)).stdout.strip() == "the keys are equal"
    refused = await relight("release", first)
    assert (refused.returncode, "not in quarantine" in refused.stderr) == (4, True), refused


async def test_two_starts_at_once_compile_once_and_the_other_one_waits_and_says_so(fleet: Fleet) -> None:
    await fleet.add("a")
    await fleet.add("b")
    await fleet.ring("a", "b")
    scaling = asyncio.create_task(fleet.scale(2))
    waiting = await fleet.until(
        fleet.running.instances, lambda found: [i for i in found if "waits for" in i["members"][0]["progress"]]
    )
    assert any("which compiles the same" in i["members"][0]["progress"] for i in waiting)
    await scaling
    found = [t["cache"] for t in (await fleet.starts(2)).values()]
    assert sorted(c["verdict"] for c in found) == ["compiled", "hit"], found
    assert max(c["waited_seconds"] for c in found) > 0


async def test_the_bundle_of_a_node_that_died_is_still_found_and_trusted(fleet: Fleet) -> None:
    for name in ("a", "b", "c"):
        await fleet.add(name)
    await fleet.ring("a", "b", "c")
    await fleet.scale(1)
    ((first, _),) = (await fleet.starts(1)).items()
    await fleet.slots[first].kill()
    left = [n for n in fleet.slots if n != first]
    await fleet.ring(*left)
    await fleet.scale(2)

    # What the dead node ran is still listed as it was last seen.
    found = await fleet.starts(3)
    assert [found[slot]["cache"]["verdict"] for slot in left] == ["hit", "hit"], found
    # A replica was lost with the node: the others bring it back.
    repaired = await fleet.until(fleet.bundles, lambda b: len(b[0]["nodes"]) == 2)
    assert repaired[0]["nodes"] == left


async def test_an_altered_bundle_is_refused_and_the_start_compiles_and_says_why(fleet: Fleet) -> None:
    await fleet.add("a")
    await fleet.add("b")
    await fleet.ring("a", "b")
    await fleet.scale(1)
    ((first, _),) = (await fleet.starts(1)).items()
    bodies = list(fleet.root.glob("*/state/compile-cache/bundles/*/body"))
    assert len(bodies) == 2
    for body in bodies:
        body.write_bytes(body.read_bytes()[:-1] + b"!")
    await fleet.scale(2)
    ((_, start),) = ((slot, t) for slot, t in (await fleet.starts(2)).items() if slot != first)
    assert (start["cache"]["verdict"], start["cache"]["compiled"]) == ("compiled", 1)
    assert "not what was signed" in start["cache"]["reason"] or "altered" in start["cache"]["reason"], start["cache"]


async def test_a_bundle_that_fails_to_load_is_quarantined_until_somebody_releases_it(fleet: Fleet) -> None:
    await fleet.add("a")
    await fleet.add("b")
    await fleet.ring("a", "b")
    await fleet.scale(1)
    await fleet.starts(1)
    spec = model(mode="normal", args=['compiles="graph"', "refuses_artefacts=true"], replicas=2, env=CHECKOUT)
    body = {k: v for k, v in spec.items() if k not in ("name", "namespace")}
    reply = await fleet.running.client.put(MODEL, json=body, headers={"If-Match": "*"})
    assert reply.status_code == 200, reply.text
    found = await fleet.until(fleet.bundles, lambda b: b and b[0]["quarantine"])
    key = found[0]["key"]
    assert "failed to load" in found[0]["quarantine"]
    assert (await fleet.running.client.get("/api/v1/cache/keys/ffff")).status_code == 404
    shown = (await fleet.running.client.get(f"/api/v1/cache/keys/{key[:8]}")).json()
    assert shown["quarantine"] == found[0]["quarantine"]
    viewer = {"Authorization": f"Bearer {TOKENS['viewer']}"}
    path = f"/api/v1/cache/keys/{key[:8]}/release"
    assert (await fleet.running.client.post(path, headers=viewer)).status_code == 403
    released = await fleet.running.client.post(path)
    assert released.status_code == 200, released.text
    assert released.json()["nodes"] == ["a", "b"]
    assert await fleet.bundles() == []
    assert (await fleet.running.client.post(path)).status_code == 404


async def test_an_archive_carries_bundles_out_of_one_ring_and_into_another(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.add("a")
    await fleet.add("b")
    await fleet.ring("a", "b")
    await fleet.scale(1)
    ((first, start),) = (await fleet.starts(1)).items()

    def carry(action: str, slot: Slot) -> subprocess.CompletedProcess[str]:
        module = {"export": ["relight.controller.cli", "cache"], "import": ["relight.agent.cache"]}[action]
        command = [sys.executable, "-m", *module, action, str(tmp_path / "archive")]
        return subprocess.run(
            [*command, "--config", str(slot.directory / "config.json")],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip

    heard = fleet.slots[first].directory / "state" / "compile-cache" / "ring.json"

    async def known() -> set[str]:
        return {n["slot"] for n in json.loads(heard.read_text())["nodes"]} if heard.exists() else set()

    await fleet.until(known, lambda nodes: nodes == {"a", "b"})
    assert heard.stat().st_mode & 0o077 == 0
    done = await asyncio.to_thread(carry, "export", fleet.slots[first])
    assert (done.returncode, json.loads(done.stdout)["bundles"]) == (0, [start["cache"]["bundle"]]), done.stderr
    for slot in fleet.slots.values():
        await slot.kill()
        for kept in (slot.directory / "state" / "compile-cache" / "bundles").iterdir():
            (kept / "body").unlink()
        await slot.up()
    await fleet.ring("a", "b")
    assert await fleet.until(fleet.bundles, lambda found: not found) == []

    async def imported() -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(carry, "import", fleet.slots[first])

    # Grants of the nodes that ran before are of no use: the agents hear of new ones as soon as they are attached.
    await fleet.until(imported, lambda done: done.returncode == 0)
    assert [b["bundle"] for b in await fleet.bundles()] == [start["cache"]["bundle"]]
