"""One walk for all tests of this folder: Relight runs, is scraped and ends; Prometheus stays to be asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.dashboards.all import RULES
from tests.dashboards.prometheus import ROOT, Prometheus, Recorded
from tests.dashboards.recorded import FILE
from tests.dashboards.walk import answering, running, walk

from support.controlplane import free_port


@dataclass(frozen=True, slots=True)
class Walked:
    """`begin` to `end` Relight was scraped alone; from then to `recorded_until` the recorded devices beside it.

    `answers` are the statuses that clients got.
    """

    prometheus: Prometheus
    begin: float
    end: float
    recorded_until: float
    answers: tuple[int, ...]


async def _scraped(folder: Path, port: int) -> Walked:
    recorded_port = free_port()
    async with running() as relight:
        jobs = {**relight.metrics, "recorded": [f"127.0.0.1:{recorded_port}"]}
        prometheus = Prometheus(folder, port, jobs, ROOT / RULES)
        try:
            begin = time.time()
            targets = sum(map(len, relight.metrics.values()))
            await answering(prometheus, f'sum(up{{job!="recorded"}}) == {targets}')
            await walk(relight, prometheus)
            end = time.time()
            recorded = Recorded(FILE, folder / "recorded", recorded_port)
            # One more than are needed to have a point within the time.
            await answering(prometheus, "min(count_over_time(relight_device_power_watts[1m])) >= 3")
            recorded_until = time.time()
            recorded.close()
        except BaseException:
            prometheus.close()
            raise
    return Walked(prometheus, begin, end, recorded_until, tuple(relight.answers))


@pytest.fixture(scope="session")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    found = asyncio.run(_scraped(tmp_path_factory.mktemp("prometheus"), free_port()))
    yield found
    found.prometheus.close()
