"""The dashboard of whoever serves models: what clients see, and how the fleet follows."""

from __future__ import annotations

from .grafana import Dashboard, Panel, Query, Row, Unit, Variable

M = 'model=~"$model"'
R = "[$__rate_interval]"
MODELS = (
    Variable("namespace", "label_values(relight_desired_replicas, model)", "/^([^\\/]+)\\/.*$/"),
    Variable("model", 'label_values(relight_desired_replicas{model=~"$namespace/.*"}, model)'),
)
EVENTS = f"sum by (model) (changes(relight_desired_replicas{{{M}}}[1m])) > 0"


def quantile(share: float, metric: str, by: str, selector: str = M) -> str:
    """Of a histogram, over all instances of a component."""
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{{{selector}}}{R})))"


_BAD = 'status=~"5..|429"'
_REQUESTS = f"sum by (model) (rate(relight_gateway_requests_total{{{M}}}{R}))"

_CLIENTS = Row(
    "What clients see",
    (
        Panel(
            "Time to first byte, p99",
            "From a request's arrival at the gateway to the first byte of its answer, the time held included."
            " Scale events are marked.",
            Unit.SECONDS,
            (Query(quantile(0.99, "relight_gateway_first_byte_seconds", "model"), "{{model}}"),),
            width=12,
        ),
        Panel(
            "Time to first byte, p50",
            "The median of the same.",
            Unit.SECONDS,
            (Query(quantile(0.5, "relight_gateway_first_byte_seconds", "model"), "{{model}}"),),
            width=12,
        ),
        Panel(
            "Errors",
            "Share of requests answered 5xx or 429. No request shall fail because of a scale event.",
            Unit.RATIO,
            (
                Query(
                    f"(sum by (model) (rate(relight_gateway_requests_total{{{M}, {_BAD}}}{R})) or 0 * {_REQUESTS})"
                    f" / {_REQUESTS}",
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "Requests by status",
            "As answered to clients.",
            Unit.PER_SECOND,
            (Query(f"sum by (status) (rate(relight_gateway_requests_total{{{M}}}{R}))", "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Burn of the first-byte budget",
            "How many times faster than allowed the budget of slow answers is spent (runbooks/first-byte-budget.md): 1"
            " spends it exactly.",
            Unit.COUNT,
            (
                Query(f"model:relight_first_byte_burn:rate5m{{{M}}}", "{{model}} 5 min"),
                Query(f"model:relight_first_byte_burn:rate1h{{{M}}}", "{{model}} 1 h", apart=True),
            ),
        ),
        Panel(
            "Requests held",
            "Waiting at gateways for a replica that is being brought up.",
            Unit.COUNT,
            (Query(f"sum by (model) (relight_gateway_requests_held{{{M}}})", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Oldest held request, against prediction",
            "Above the dashed line a replica is later than it was predicted to be.",
            Unit.SECONDS,
            (
                Query(f"max by (model) (relight_gateway_oldest_held_seconds{{{M}}})", "{{model}}"),
                Query(f"max by (model) (relight_start_predicted_seconds{{{M}}})", "{{model}} predicted", apart=True),
            ),
        ),
        Panel(
            "Time held, p99",
            "From arrival to a replica, over all requests.",
            Unit.SECONDS,
            (Query(quantile(0.99, "relight_gateway_hold_seconds", "model"), "{{model}}"),),
        ),
        Panel(
            "In flight",
            "Requests at engines.",
            Unit.COUNT,
            (Query(f"sum by (model) (relight_gateway_requests_in_flight{{{M}}})", "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Tried again",
            "Requests that a replica failed before the first byte and another one was given.",
            Unit.PER_SECOND,
            (Query(f"sum by (model) (rate(relight_gateway_retries_total{{{M}}}{R}))", "{{model}}"),),
        ),
        Panel(
            "Hung up",
            "Requests whose client left before the end.",
            Unit.PER_SECOND,
            (Query(f"sum by (model) (rate(relight_gateway_cancelled_total{{{M}}}{R}))", "{{model}}"),),
        ),
    ),
)

_SCALE = Row(
    "How the fleet follows",
    (
        Panel(
            "Replicas: decided and ready",
            "Where the lines part, replicas are on their way or missing.",
            Unit.COUNT,
            (
                Query(f"max by (model) (relight_ready_replicas{{{M}}})", "{{model}} ready"),
                Query(f"max by (model) (relight_desired_replicas{{{M}}})", "{{model}} decided", apart=True),
            ),
        ),
        Panel(
            "Instances by state",
            "Dormant ones are guardians; waking and starting ones are on their way.",
            Unit.COUNT,
            (Query(f"sum by (state) (relight_instances{{{M}}})", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Scale events",
            "What instances were told to become.",
            Unit.COUNT,
            (
                Query(
                    f"sum by (model, desired) (increase(relight_placements_total{{{M}}}{R}))", "{{model}} {{desired}}"
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Next replica expected in",
            "Below 0 it is overdue; nothing is drawn while none is on its way.",
            Unit.SECONDS,
            (Query(f"min by (model) (relight_ready_expected_timestamp_seconds{{{M}}}) - time()", "{{model}}"),),
        ),
        Panel(
            "Replicas missing for, against prediction",
            "How long fewer replicas are ready than decided on, beside the longest prediction of those on their way.",
            Unit.SECONDS,
            (
                Query(f"time() - min by (model) (relight_short_since_timestamp_seconds{{{M}}})", "{{model}}"),
                Query(f"max by (model) (relight_start_predicted_seconds{{{M}}})", "{{model}} predicted", apart=True),
            ),
        ),
        Panel(
            "Load and what it asks for",
            "Requests held and in flight; on the right, the replicas that they ask for (docs/scaling.md).",
            Unit.COUNT,
            (
                Query(f"max by (model) (relight_demand{{{M}}})", "{{model}} requests"),
                Query(f"max by (model) (relight_target_replicas{{{M}}})", "{{model}} replicas", right=Unit.COUNT),
            ),
        ),
        Panel(
            "Guardians: decided and asleep",
            "By level: 1 keeps a host copy of the weights, 2 keeps nothing.",
            Unit.COUNT,
            (
                Query(f"max by (model, level) (relight_guardians{{{M}}})", "{{model}} level {{level}}"),
                Query(
                    f"max by (model, level) (relight_desired_guardians{{{M}}})",
                    "{{model}} level {{level}} decided",
                    apart=True,
                ),
            ),
        ),
        Panel(
            "Guardian hits and misses",
            "Missing replicas of models that keep guardians: hit where one was woken, miss where one was started.",
            Unit.COUNT,
            (
                Query(
                    f"sum by (model, outcome) (increase(relight_guardian_requests_total{{{M}}}{R}))",
                    "{{model}} {{outcome}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Guardian hit rate",
            "Over the range that is shown.",
            Unit.RATIO,
            (
                Query(
                    f'sum by (model) (increase(relight_guardian_requests_total{{{M}, outcome="hit"}}[$__range]))'
                    f" / sum by (model) (increase(relight_guardian_requests_total{{{M}}}[$__range]))",
                    "{{model}}",
                ),
            ),
            single=True,
        ),
        Panel(
            "Sources of weights",
            "What a wake could read: ready peers, copies in host memory. At 0 a level-2 guardian wakes from storage or"
            " disk.",
            Unit.COUNT,
            (Query(f"max by (model, kind) (relight_sources{{{M}}})", "{{model}} {{kind}}"),),
        ),
        Panel(
            "Failed instances",
            "By what they were to be. `relight explain INSTANCE` has the reason.",
            Unit.COUNT,
            (
                Query(
                    f"sum by (model, desired) (increase(relight_instance_failures_total{{{M}}}{R}))",
                    "{{model}} wanted {{desired}}",
                ),
            ),
            stacked=True,
        ),
    ),
)

SERVING = Dashboard(
    "relight-serving", "Relight / Serving and scale", "What clients see, and how the fleet follows the load.",
    (_CLIENTS, _SCALE), MODELS, EVENTS,
)  # fmt: skip
