"""docs/metrics.md, out of the registries."""

from __future__ import annotations

from collections.abc import Iterable

from .inventory import Exposed

_HEAD = """# Metrics

Written by `make docs` from the components' registries; do not edit.

| component | where |
|---|---|
| controller | `GET /metrics` of its REST port, no identity asked; a stand-by has none |
| gateway | `GET /metrics` of its front door |
| agent | `GET /metrics` of `metrics_port` (slot pods: port `metrics`, 8001; one machine: `metrics_port` of a node) |

A model is `namespace/name`, a slot its name; no label holds an instance, an operation or a request. Counters and
histograms begin anew with each process. Gauges of a model or a slot that is gone are gone. Times that pass are told as
timestamps: `time() - relight_short_since_timestamp_seconds`. Asked for OpenMetrics, the controller adds to each start
the `trace_id` under which it is exported (exemplars of `relight_start_seconds`). What numbers cannot say, such as the
reason of a choice, is in `relight explain` and `relight timeline`.

What a device cannot tell has no series: on CPU cores temperature and power are absent, and capacities where there are
no cards. Dashboards and alerts over all of this: [dashboards](dashboards.md), [runbooks](runbooks/README.md).
"""


def page(metrics: Iterable[Exposed]) -> str:
    """One table for each component."""
    parts = [_HEAD]
    found = list(metrics)
    for by in dict.fromkeys(metric.by for metric in found):
        rows = "\n".join(_row(metric) for metric in found if metric.by == by)
        parts.append(
            f"## {by.capitalize()}\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def _row(metric: Exposed) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
    return f"| `{metric.name}` | {metric.kind} | {metric.unit or 'count'} | {labels} | {metric.told} |"
