"""`make test-chart`: the Helm chart, against schemas and a control plane; the last line of the output is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LEAST = {"requests_sent": 300, "combinations": 24}
NONE = ("requests_lost", "resources_left_after_purge")


class Count:
    """How many tests passed, and which this machine could not run; pytest's summary has the reasons."""

    def __init__(self) -> None:
        self.passed = 0
        self.not_run: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.skipped:
            self.not_run.append(report.nodeid.rpartition("::")[2])


def main() -> int:
    count = Count()
    status = pytest.main(["-m", "chart", "--durations=5", str(FOLDER)], plugins=[count])
    # Only now: pytest has put the tests' own folder on the path, and they have filled it.
    from tests.chart.figures import COUNTS, FIGURES

    print(json.dumps({**COUNTS, **FIGURES, "checks": count.passed, "not_run": count.not_run}))
    short = [name for name, least in LEAST.items() if COUNTS[name] < least]
    return int(status) or int(bool(short) or any(COUNTS[name] for name in NONE))


if __name__ == "__main__":
    raise SystemExit(main())
