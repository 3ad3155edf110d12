"""One control plane for all tests of this folder, without Relight's definitions: the chart brings them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.chart.helm import SYSTEM, VERSIONS, Helm
from tests.chart.release import RESOURCE, TENANT
from tests.kubernetes.admission import Admission
from tests.kubernetes.plane import ControlPlane

REPORT = pytest.StashKey[str]()


@pytest.fixture(params=VERSIONS)
def helm(request: pytest.FixtureRequest) -> Helm:
    """Each version of Helm, without a cluster."""
    return Helm(request.param)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    with ControlPlane.start(tmp_path_factory.mktemp("plane")) as running:
        for name in (SYSTEM, TENANT):
            running.kubectl("create", "namespace", name)
        yield running
        request.config.stash[REPORT] = running.report()


@pytest.fixture(scope="session")
def ready(plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane with a node whose pods these tests run as processes."""
    plane.hollow_node("slots-0", {"slots": "yes"}, {RESOURCE: 4, "nvidia.com/gpu": 4})
    admission = Admission(plane)
    yield plane
    admission.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if report := config.stash.get(REPORT, ""):
        terminalreporter.write_line(report)


def pytest_make_parametrize_id(val: object) -> str | None:
    return json.dumps(val) if isinstance(val, dict) and len(json.dumps(val)) < 60 else None
