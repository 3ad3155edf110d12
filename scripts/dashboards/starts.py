"""The dashboard of starts: where their time goes, by which modes and rungs, what was transferred, what was cached."""

from __future__ import annotations

from .grafana import Dashboard, Panel, Query, Row, Unit
from .serving import EVENTS, MODELS, M, R, quantile

_STARTS = Row(
    "Starts and wakes",
    (
        Panel(
            "Last start of $model: phases against prediction",
            "The phases of the last good start, stacked; dashed, what was predicted from assignment to ready. Accept,"
            " decide and dispatch are the control plane's own.",
            Unit.SECONDS,
            (
                Query(f"max by (phase) (relight_last_start_phase_seconds{{{M}}})", "{{phase}}"),
                Query(f'max(relight_last_start_seconds{{{M}, figure="predicted"}})', "predicted", apart=True),
            ),
            width=12,
            stacked=True,
            repeated="model",
        ),
        Panel(
            "Last start, measured and predicted",
            "From assignment to ready.",
            Unit.SECONDS,
            (Query(f"max by (model, figure) (relight_last_start_seconds{{{M}}})", "{{model}} {{figure}}"),),
        ),
        Panel(
            "Starts by mode, p99",
            "A guardian wakes in about a second; a cold start takes minutes.",
            Unit.SECONDS,
            (Query(quantile(0.99, "relight_start_seconds", "mode", f'{M}, outcome="ok"'), "{{mode}}", traces=True),),
        ),
        Panel(
            "Starts by way and outcome",
            "A way is a mode and the rung that brought the weights.",
            Unit.COUNT,
            (Query(f"sum by (way, outcome) (increase(relight_start_seconds_count{{{M}}}{R}))", "{{way}} {{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Phases of starts, p90",
            "Over all models. A phase that grew is named by `relight timeline`.",
            Unit.SECONDS,
            (Query(quantile(0.9, "relight_start_phase_seconds", "mode, phase", 'phase!=""'), "{{mode}} {{phase}}"),),
        ),
        Panel(
            "Error of predictions, p50",
            "By which share of a good start's time its prediction was wrong.",
            Unit.RATIO,
            (Query(quantile(0.5, "relight_start_prediction_error_ratio", "mode", 'mode!=""'), "{{mode}}"),),
        ),
        Panel(
            "Share of the last start in named phases",
            "What is missing to 1 nobody accounts for.",
            Unit.RATIO,
            (Query(f"min by (model) (relight_start_accounted_ratio{{{M}}})", "{{model}}"),),
        ),
        Panel(
            "Transitions on slots, p90",
            "As agents time them: starts, wakes, sleeps, stops.",
            Unit.SECONDS,
            (
                Query(
                    quantile(0.9, "relight_agent_transition_seconds", "kind, outcome", 'kind!=""'),
                    "{{kind}} {{outcome}}",
                ),
            ),
        ),
    ),
)

_CHOICES = Row(
    "Modes and rungs",
    (
        Panel(
            "Modes: asked for and taken",
            "Where they differ, `relight explain MODEL` says why the one asked for did not fit.",
            Unit.COUNT,
            (
                Query(
                    f"sum by (model, asked, taken) (increase(relight_modes_total{{{M}}}{R}))",
                    "{{model}} {{asked}}: {{taken}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Rungs: tried, and why they failed",
            "The cause is the error's own word: a fault of the source, of the receiver, a proof that failed.",
            Unit.COUNT,
            (
                Query(
                    f"sum by (rung, outcome, cause) (increase(relight_rungs_total{{{M}}}{R}))",
                    "{{rung}} {{outcome}} {{cause}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Slower paths than expected",
            "Wakes whose weights came by another path than both ends are equipped for.",
            Unit.COUNT,
            (
                Query(
                    f"sum by (model, taken, expected) (increase(relight_slow_path_total{{{M}}}{R}))",
                    "{{model}} {{taken}} instead of {{expected}}",
                ),
            ),
            stacked=True,
        ),
    ),
)

_MOVED = f"sum by (rung) (increase(relight_transfer_bytes_total{{{M}}}{R}))"
_TOOK = f"sum by (rung) (increase(relight_transfer_seconds_sum{{{M}}}{R}))"

_TRANSFER = Row(
    "Transfer",
    (
        Panel(
            "Speed by path, against what is counted on",
            "Bytes over the seconds of the rung, proof included; dashed, what planning counts on. On the right, what"
            " clients of the source wait meanwhile.",
            Unit.BYTES_PER_SECOND,
            (
                Query(f"{_MOVED} / {_TOOK}", "{{rung}}"),
                Query("max by (rung) (relight_transfer_expected_bytes_per_second)", "{{rung}} counted on", apart=True),
                Query(
                    quantile(0.99, "relight_gateway_first_byte_seconds", "model"),
                    "{{model}} first byte, p99",
                    right=Unit.SECONDS,
                ),
            ),
            width=12,
        ),
        Panel(
            "Bytes by path",
            "Weights that good rungs brought; dashed, those of them that came from instances which were being filled"
            " themselves.",
            Unit.BYTES_PER_SECOND,
            (
                Query(f"sum by (rung) (rate(relight_transfer_bytes_total{{{M}}}{R}))", "{{rung}}"),
                Query(
                    f"sum by (rung) (rate(relight_transfer_passed_on_bytes_total{{{M}}}{R}))",
                    "{{rung}} passed on",
                    apart=True,
                ),
            ),
            width=12,
            stacked=True,
        ),
        Panel(
            "Capacity of cards",
            "What the link of each RDMA card carries: a wake by peer_rdma that reads by several reaches for their sum.",
            Unit.BYTES_PER_SECOND,
            (Query("max by (instance, card) (relight_card_capacity_bytes_per_second)", "{{instance}} {{card}}"),),
            device_only=True,
        ),
        Panel(
            "Seconds by path, p90",
            "Of good rungs, proof included.",
            Unit.SECONDS,
            (Query(quantile(0.9, "relight_transfer_seconds", "rung"), "{{rung}}"),),
        ),
    ),
)

_CACHES = Row(
    "Caches",
    (
        Panel(
            "Compiled code: hits and misses",
            "Starts that asked the ring for a bundle. In a scale-out of a known engine every one is a hit.",
            Unit.COUNT,
            (Query(f"sum by (outcome) (increase(relight_cache_starts_total{R}))", "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Compilations",
            "Starts whose engine compiled something.",
            Unit.COUNT,
            (Query(f"sum(increase(relight_cache_compiles_total{R}))", "compiled"),),
        ),
        Panel(
            "Bundles against quota",
            "By cache node.",
            Unit.BYTES,
            (
                Query("max by (slot) (relight_cache_bytes)", "{{slot}}"),
                Query("max by (slot) (relight_cache_quota_bytes)", "{{slot}} quota", apart=True),
            ),
        ),
        Panel(
            "Bundles and quarantine",
            "Keys in quarantine are not used until somebody releases them (`relight cache release`).",
            Unit.COUNT,
            (
                Query("sum(relight_cache_bundles)", "bundles"),
                Query("max(relight_cache_quarantined)", "quarantined", apart=True),
            ),
        ),
        Panel(
            "Host copies against budget",
            "Weights in host memory, by slot.",
            Unit.BYTES,
            (
                Query("max by (slot) (relight_host_copy_bytes)", "{{slot}}"),
                Query("max by (slot) (relight_host_copy_budget_bytes)", "{{slot}} budget", apart=True),
            ),
        ),
        Panel(
            "Host copies that serve",
            "By slot.",
            Unit.COUNT,
            (Query("max by (slot) (relight_host_copy_ready)", "{{slot}}"),),
        ),
    ),
)

STARTS = Dashboard(
    "relight-starts", "Relight / Starts and transfer", "Where the time of starts goes, and where weights come from.",
    (_STARTS, _CHOICES, _TRANSFER, _CACHES), MODELS, EVENTS,
)  # fmt: skip
