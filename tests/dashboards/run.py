"""`make test-dashboards`: every panel and every alert; the last line of the output is JSON with the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LEAST_PANELS, LEAST_ALERTS = 30, 8


def main() -> int:
    status = pytest.main(["-m", "dashboards", "--durations=3", str(FOLDER)])
    # Only now: pytest has put the tests' own folder on the path, and they have filled these.
    from tests.dashboards.figures import FIGURES

    print(json.dumps(FIGURES))
    enough = FIGURES["panels"] >= LEAST_PANELS and FIGURES["alerts"] >= LEAST_ALERTS
    whole = FIGURES["panels_without_data"] == 0 and FIGURES["alerts_untested"] == 0
    return int(status) or int(not (enough and whole))


if __name__ == "__main__":
    raise SystemExit(main())
