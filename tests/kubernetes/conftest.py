"""One control plane for all tests of this folder: each test uses names of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.kubernetes.admission import Admission
from tests.kubernetes.cluster import RESOURCE, Cluster, made, manifests
from tests.kubernetes.plane import ControlPlane

REPORT = pytest.StashKey[str]()
KINDS = Path(__file__).with_name("pans.yaml").read_text()


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    with ControlPlane.start(tmp_path_factory.mktemp("plane"), early=[KINDS, *manifests()]) as running:
        yield running
        request.config.stash[REPORT] = running.report()


@pytest.fixture(scope="session")
def nodes(plane: ControlPlane) -> Iterator[list[str]]:
    """Two nodes with room for four slots each, whose slot pods can run."""
    for name in ("slots-0", "slots-1"):
        plane.hollow_node(name, {"slots": "yes"}, {RESOURCE: 4})
    admission = Admission(plane)
    yield ["slots-0", "slots-1"]
    admission.close()


@pytest.fixture
async def cluster(plane: ControlPlane, nodes: list[str], request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A namespace and what runs in it, for one test."""
    name = f"t{sum(map(ord, request.node.name)) % 1000}-{len(request.node.name)}"
    async with made(plane, name) as running:
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if report := config.stash.get(REPORT, ""):
        terminalreporter.write_line(report)
