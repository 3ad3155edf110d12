"""A guardian that wakes from a running engine's memory, on one GPU: python -m tests.gpu.peers_check. In eight minutes.

Settings as those of engine_check. Both engines lie on one device; each transport that the source serves is taken in
turn, the fastest first, and each wake is proven by digests and by the canary of the source.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from relight.core.records import Mode, OnTimeout, Rung, RungKind, SourceOffer, SourceRef
from relight.transfer import grants
from tests.gpu.engine_check import CANARY, MODEL, PYTHON, SECONDS, Started, started
from tests.gpu.table import Table

KINDS = (RungKind.PEER_NVLINK, RungKind.PEER_NIXL, RungKind.PEER_RDMA, RungKind.PEER_TCP)
MUST = (RungKind.PEER_NVLINK, RungKind.PEER_TCP)
"""What a device without any card serves as well."""


def rung(kind: RungKind, offer: SourceOffer) -> Rung:
    """As the controller writes it: with a grant."""
    claims = grants.Claims("i-source", offer.generation, offer.manifest_digest, "i-sleeper", time.time() + 600)
    source = SourceRef(
        "i-source", "a", offer.generation, offer.manifest_digest, offer.content_digest, offer.addresses[kind.transport],
        grants.mint(offer.grant_key, claims),
    )  # fmt: skip
    return Rung(kind, "check", source)


async def wake(table: Table, sleeper: Started, kind: RungKind, offer: SourceOffer) -> None:
    handle = sleeper.handle
    await handle.wait_idle(30.0, OnTimeout.WAIT)
    await handle.close_source(5.0)
    await handle.sleep(2)
    begun = time.perf_counter()
    got = await handle.refill(rung(kind, offer), "r1", lambda said: None)
    brought = time.perf_counter() - begun
    await handle.resume()
    proof, _ = await handle.prove()
    table.row(f"{kind}: wake, proven", time.perf_counter() - begun, "s")
    table.row(f"{kind}: bytes per second", got.bytes / brought / 1e9, "GB/s")
    table.must(f"{kind}: the source's tokens and log-probabilities", proof.tokens == CANARY)


async def check(table: Table, scratch: Path) -> None:
    caches = scratch / "caches"
    caches.mkdir()
    async with (
        started(scratch / "source", Mode.COLD, caches, "i-source") as source,
        started(scratch / "sleeper", Mode.COLD, caches, "i-sleeper") as sleeper,
    ):
        facts = await source.handle.describe()
        described = next((p.end - p.start for p in facts.phases if p.name == "describe"), 0.0)
        table.row("digests of all weights at a start", described, "s")
        for card, way in facts.direct.items():
            table.row(f"card {card}", way)
        offer = await source.handle.open_source()
        for transport, why in offer.closed.items():
            table.row(f"closed: {transport}", why)
        for kind in MUST:
            table.must(f"{kind} is served", kind.transport in offer.addresses, offer.closed.get(kind.transport, ""))
        plain = await source.decode()
        for kind in KINDS:
            if kind.transport in offer.addresses:
                await wake(table, sleeper, kind, offer)
        await sleeper.handle.close_source(5.0)
        await sleeper.handle.sleep(2)
        speed, _ = await asyncio.gather(
            source.decode(), sleeper.handle.refill(rung(RungKind.PEER_TCP, offer), "r1", lambda said: None)
        )
        table.row("decode of the source around a read through the host, share", speed / plain)


async def main() -> int:
    if not PYTHON:
        sys.exit("RELIGHT_GPU_PYTHON names no interpreter with vLLM for GPUs")
    table = Table(f"wakes from a running engine, by {PYTHON}, {MODEL}")
    scratch = Path(tempfile.mkdtemp(prefix="rl-gpu-"))
    try:
        async with asyncio.timeout(SECONDS):
            await check(table, scratch)
    except Exception as error:  # noqa: BLE001 - what was measured until then is shown
        table.must("the whole check", False, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return table.show()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
