"""The dashboard of the control plane itself."""

from __future__ import annotations

from .grafana import Dashboard, Panel, Query, Row, Unit
from .serving import R, quantile

_WHO = Row(
    "Who is there",
    (
        Panel(
            "Epoch",
            "Grows with each change of the leading controller; agents refuse a lower one.",
            Unit.COUNT,
            (Query("max(relight_epoch)", "epoch"),),
            single=True,
        ),
        Panel(
            "Slots",
            "Awaited: not heard of since the controller began. Lost: their agents went away and left instances.",
            Unit.COUNT,
            (Query("max by (state) (relight_slots)", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Attached",
            "Agents and gateways that the controller speaks to, by their own word.",
            Unit.COUNT,
            (
                Query("sum(relight_agent_attached)", "agents"),
                Query("sum(relight_gateway_attached)", "gateways"),
            ),
        ),
    ),
)

_PACE = Row(
    "Pace",
    (
        Panel(
            "Slots behind",
            "Slots that have not acted on their newest assignment yet.",
            Unit.COUNT,
            (Query("max(relight_slots_behind)", "slots"),),
        ),
        Panel(
            "Gateways by route table",
            "Whether they route by the newest one.",
            Unit.COUNT,
            (Query("max by (current) (relight_gateways)", "newest table: {{current}}"),),
            stacked=True,
        ),
        Panel(
            "Dispatch, p99",
            "From a written assignment to the first thing that an agent does about it.",
            Unit.SECONDS,
            (Query(quantile(0.99, "relight_start_phase_seconds", "mode", 'phase="dispatch"'), "{{mode}}"),),
        ),
        Panel(
            "Reconcile pass, p99",
            "One look at everything, and what follows from it.",
            Unit.SECONDS,
            (Query(quantile(0.99, "relight_reconcile_seconds", "outcome", 'outcome!=""'), "{{outcome}}"),),
        ),
        Panel(
            "Reconcile passes",
            "Moved: the state changed under the pass, which is done again.",
            Unit.PER_SECOND,
            (Query(f"sum by (outcome) (rate(relight_reconcile_seconds_count{R}))", "{{outcome}}"),),
            stacked=True,
        ),
    ),
)

_STORE = Row(
    "Store and rules",
    (
        Panel(
            "Store latency, p99",
            "By call.",
            Unit.SECONDS,
            (Query(quantile(0.99, "relight_store_seconds", "operation", 'operation!=""'), "{{operation}}"),),
        ),
        Panel(
            "Store calls by outcome",
            "Conflicts are part of the day; failures are not.",
            Unit.PER_SECOND,
            (
                Query(
                    f"sum by (operation, outcome) (rate(relight_store_seconds_count{R}))", "{{operation}} {{outcome}}"
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Broken invariants",
            "Anything above 0 is a defect of Relight (runbooks/invariant-broken.md).",
            Unit.COUNT,
            (Query(f"sum by (rule) (increase(relight_invariant_violations_total{R}))", "{{rule}}"),),
        ),
    ),
)

PLANE = Dashboard(
    "relight-control-plane", "Relight / Control plane", "The controller, its store, and who follows it.",
    (_WHO, _PACE, _STORE),
)  # fmt: skip
