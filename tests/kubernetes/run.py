"""`make test-kubernetes`: what needs a control plane; the last line of the output is JSON with the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


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
    status = pytest.main(["-m", "kubernetes", "--durations=5", str(FOLDER)], plugins=[count])
    # Only now: pytest has put the tests' own folder on the path, and they have filled these.
    from tests.kubernetes.figures import COUNTS, FIGURES

    print(json.dumps({**FIGURES, **COUNTS, "checks": count.passed, "not_run": count.not_run}))
    return int(status) or int(COUNTS["requests_lost"] > 0 or COUNTS["stale_epoch_effects"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
