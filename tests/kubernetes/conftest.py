"""One control plane for all tests of this folder: each test uses names of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubernetes.plane import ControlPlane

REPORT = pytest.StashKey[str]()
KINDS = Path(__file__).with_name("pans.yaml").read_text()


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    with ControlPlane.start(tmp_path_factory.mktemp("plane"), early=[KINDS]) as running:
        yield running
        request.config.stash[REPORT] = running.report()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if report := config.stash.get(REPORT, ""):
        terminalreporter.write_line(report)
