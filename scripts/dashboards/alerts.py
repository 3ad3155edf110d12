"""Alerts and the service-level objective behind two of them, as a Prometheus rule file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNBOOKS = "https://relight.example/docs/runbooks/"
"""Where docs/runbooks is published: the chart puts its own address in its place."""
FAST_ENOUGH, OBJECTIVE = "2.5", 0.99
"""Seconds, by the bounds of the buckets, within which this share of first bytes shall come."""
PAGE, TICKET = "page", "ticket"
SLO_SECONDS = "30s"
"""How often what the objective needs is computed."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """An expression whose value is kept under a name."""

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class Alert:
    """`lasting` is how long it has to be true. `summary` may name labels as Prometheus' templates do."""

    name: str
    expression: str
    lasting: str
    severity: str
    summary: str
    runbook: str
    """A page of docs/runbooks, without its ending."""


def _burn(window: str) -> Recorded:
    """How many times faster than allowed slow first bytes spend their budget."""
    fast = f'sum by (model) (rate(relight_gateway_first_byte_seconds_bucket{{le="{FAST_ENOUGH}"}}[{window}]))'
    every = f"sum by (model) (rate(relight_gateway_first_byte_seconds_count[{window}]))"
    return Recorded(f"model:relight_first_byte_burn:rate{window}", f"(1 - {fast} / {every}) / {1 - OBJECTIVE:.2f}")


RECORDED = tuple(_burn(window) for window in ("5m", "30m", "1h", "6h"))


def _grown(metric: str, by: str, selector: str = "", window: str = "15m") -> str:
    """Whether a counter grew. A series that was not there before counts from nothing, which `increase` does not see."""
    series = f"{metric}{{{selector}}}" if selector else metric
    return (
        f"sum by ({by}) (increase({series}[{window}])) > 0"
        f" or sum by ({by}) ({series} unless {series} offset {window}) > 0"
    )


_OLDEST = "max by (model) (relight_gateway_oldest_held_seconds)"
_SHORT = "(time() - min by (model) (relight_short_since_timestamp_seconds))"
_PREDICTED = "max by (model) (relight_start_predicted_seconds)"
_GUARDED = "sum by (model) (increase(relight_guardian_requests_total[1h]))"
_LOST = 'max(relight_slots{state="lost"})'

ALERTS = (
    Alert(
        "RelightRequestsHeldTooLong",
        f"{_OLDEST} > clamp_min(2 * ({_PREDICTED} or 0 * {_OLDEST} + 15), 5)",
        "10s", PAGE, "Requests for {{ $labels.model }} are held for twice the predicted start", "requests-held",
    ),
    Alert(
        "RelightReplicasMissing",
        f"{_SHORT} > clamp_min(2 * ({_PREDICTED} or 0 * {_SHORT} + 60), 10)",
        "30s", PAGE, "Replicas of {{ $labels.model }} are missing for twice the predicted start", "replicas-missing",
    ),
    Alert(
        "RelightProofFailed",
        _grown("relight_rungs_total", "model, rung", 'cause="proof-failed"'),
        "0s", PAGE, "Weights of {{ $labels.model }} by {{ $labels.rung }} did not pass their proof", "proof-failed",
    ),
    Alert(
        "RelightNoSource",
        'max by (model) (relight_desired_guardians{level="2"}) > 0'
        " unless on (model) sum by (model) (relight_sources) > 0",
        "2m", TICKET, "Guardians of {{ $labels.model }} could wake from storage or disk alone", "no-source",
    ),
    Alert(
        "RelightOrphanMemory",
        'sum by (instance, device) (relight_device_memory_bytes{kind="orphan"}) > 0',
        "2m", TICKET, "Memory of {{ $labels.instance }}, {{ $labels.device }} is held by nobody", "orphan-memory",
    ),
    Alert(
        "RelightGuardianHitRateLow",
        f'sum by (model) (increase(relight_guardian_requests_total{{outcome="hit"}}[1h])) / {_GUARDED} < 0.8'
        f" and {_GUARDED} >= 5",
        "0s", TICKET, "Fewer than 8 of 10 missing replicas of {{ $labels.model }} were woken", "guardian-hit-rate",
    ),
    Alert(
        "RelightSlowPath",
        _grown("relight_slow_path_total", "model, taken, expected"),
        "0s", TICKET,
        "Weights of {{ $labels.model }} came by {{ $labels.taken }} instead of {{ $labels.expected }}", "slow-path",
    ),
    Alert(
        "RelightInstancesFail",
        "sum by (model) (increase(relight_instance_failures_total[30m])) >= 5",
        "0s", TICKET, "Instances of {{ $labels.model }} fail again and again", "instances-fail",
    ),
    Alert(
        "RelightEpochChurn",
        "changes(max(relight_epoch)[30m:30s]) > 3",
        "0s", TICKET, "The leading controller changed more than three times in half an hour", "epoch-churn",
    ),
    Alert(
        "RelightSlotsUnseen",
        f'max(relight_slots{{state="awaited"}}) > 0 or {_LOST} > min_over_time({_LOST}[1h:1m])',
        "2m", PAGE, "Slots are not heard of, and what runs there counts for nothing", "slots-unseen",
    ),
    Alert(
        "RelightInvariantBroken",
        _grown("relight_invariant_violations_total", "rule"),
        "0s", PAGE, "{{ $labels.rule }} does not hold", "invariant-broken",
    ),
    Alert(
        "RelightStoreSlow",
        'histogram_quantile(0.99, sum by (le) (rate(relight_store_seconds_bucket{operation="commit"}[5m]))) > 0.5',
        "5m", TICKET, "One of a hundred commits takes over half a second", "store-slow",
    ),
    Alert(
        "RelightControllerGone",
        "absent(relight_epoch)",
        "1m", PAGE, "No controller is scraped: what serves goes on, nothing scales", "controller-gone",
    ),
    Alert(
        "RelightDetached",
        "min by (job, instance) (relight_gateway_attached) == 0"
        " or min by (job, instance) (relight_agent_attached) == 0",
        "1m", PAGE, "{{ $labels.instance }} does not hear the controller", "detached",
    ),
    Alert(
        "RelightFirstByteBudgetFast",
        "model:relight_first_byte_burn:rate1h > 14.4 and model:relight_first_byte_burn:rate5m > 14.4",
        "0s", PAGE, "{{ $labels.model }} spends a month's budget of slow answers in two days", "first-byte-budget",
    ),
    Alert(
        "RelightFirstByteBudgetSlow",
        "model:relight_first_byte_burn:rate6h > 6 and model:relight_first_byte_burn:rate30m > 6",
        "0s", TICKET, "{{ $labels.model }} spends a month's budget of slow answers in five days", "first-byte-budget",
    ),
)  # fmt: skip


def rule_file() -> dict[str, Any]:
    """As Prometheus loads it."""
    slo = [{"record": rule.name, "expr": rule.expression} for rule in RECORDED]
    return {
        "groups": [
            {"name": "relight-objectives", "interval": SLO_SECONDS, "rules": slo},
            {"name": "relight-alerts", "rules": [_rule(alert) for alert in ALERTS]},
        ]
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": f"{RUNBOOKS}{alert.runbook}.md"},
    }
