"""For each alert what it shall fire for, and what it shall be silent for, as series over time.

Values are promtool's: `5x20` is 5 and twenty repetitions, `0+1x20` grows by 1, `_x4` is absent. One stands for each
`every` seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

M = 'model="default/m"'
HELD = "relight_gateway_oldest_held_seconds{" + M + "}"
PREDICTED = "relight_start_predicted_seconds{" + M + "}"
SHORT = "relight_short_since_timestamp_seconds{" + M + "}"
UNPROVEN = "relight_rungs_total{" + M + ',rung="peer_shm",outcome="failed",cause="proof-failed"}'
REFUSED = "relight_rungs_total{" + M + ',rung="peer_shm",outcome="failed",cause="transfer-remote-fault"}'
WANTED = "relight_desired_guardians{" + M + ',level="%d"}'
SOURCES = "relight_sources{" + M + ',kind="%s"}'
MEMORY = 'relight_device_memory_bytes{instance="n:8001",device="gpu0",kind="%s"}'
GUARDIAN = "relight_guardian_requests_total{" + M + ',outcome="%s"}'
SLOW = "relight_slow_path_total{" + M + ',taken="peer_tcp",expected="peer_rdma"}'
FAILURES = "relight_instance_failures_total{" + M + ',desired="ready"}'
SLOTS = 'relight_slots{state="%s"}'
BROKEN = 'relight_invariant_violations_total{rule="only_ready_is_routable"}'
STORED = 'relight_store_seconds_bucket{operation="commit",outcome="ok",le="%s"}'
GATEWAY = 'relight_gateway_attached{job="gateway",instance="g:8400"}'
AGENT = 'relight_agent_attached{job="agent",instance="n:8001"}'
FIRST_BYTES = "relight_gateway_first_byte_seconds_count{" + M + "}"
FAST_BYTES = "relight_gateway_first_byte_seconds_bucket{" + M + ',le="2.5"}'


@dataclass(frozen=True, slots=True)
class Case:
    """What Prometheus scraped, and when the alert is looked at. `labels` are those that it fires with; None: it is
    silent."""

    alert: str
    why: str
    series: Mapping[str, str]
    at: str
    labels: Mapping[str, str] | None = None
    every: int = 15

    @property
    def fires(self) -> bool:
        return self.labels is not None


MODEL = {"model": "default/m"}
NONE: Mapping[str, str] = {}

CASES = (
    Case("RelightRequestsHeldTooLong", "late", {HELD: "10x8", PREDICTED: "2x8"}, "2m", MODEL),
    Case("RelightRequestsHeldTooLong", "nothing predicted", {HELD: "40x8"}, "2m", MODEL),
    Case("RelightRequestsHeldTooLong", "a large model takes its time", {HELD: "10x8", PREDICTED: "20x8"}, "2m"),
    Case("RelightRequestsHeldTooLong", "moments", {HELD: "3x8", PREDICTED: "0.3x8"}, "2m"),
    Case("RelightRequestsHeldTooLong", "one look is not enough", {HELD: "0x7 10x8", PREDICTED: "2x16"}, "2m"),
    Case("RelightReplicasMissing", "late", {SHORT: "0x40", PREDICTED: "60x40"}, "5m", MODEL),
    Case("RelightReplicasMissing", "no room", {SHORT: "100x40"}, "5m", MODEL),
    Case("RelightReplicasMissing", "no room for a moment", {SHORT: "200x40"}, "5m"),
    Case("RelightReplicasMissing", "a large model takes its time", {SHORT: "0x40", PREDICTED: "600x40"}, "5m"),
    Case("RelightReplicasMissing", "a wake", {SHORT: "290x40", PREDICTED: "1x40"}, "5m"),
    Case("RelightProofFailed", "the first one", {UNPROVEN: "_x8 1x8"}, "4m", {**MODEL, "rung": "peer_shm"}),
    Case("RelightProofFailed", "one more", {UNPROVEN: "3x80 4x8"}, "21m", {**MODEL, "rung": "peer_shm"}),
    Case("RelightProofFailed", "a source that was gone", {REFUSED: "_x8 1x8"}, "4m"),
    Case("RelightProofFailed", "long ago", {UNPROVEN: "_x8 1x120"}, "30m"),
    Case(
        "RelightNoSource", "nobody has them",
        {WANTED % 2: "1x20", SOURCES % "peer": "0x20", SOURCES % "host_copy": "0x20"}, "4m", MODEL,
    ),
    Case(
        "RelightNoSource", "a copy in host memory",
        {WANTED % 2: "1x20", SOURCES % "peer": "0x20", SOURCES % "host_copy": "1x20"}, "4m",
    ),
    Case(
        "RelightNoSource", "guardians keep their own copy",
        {WANTED % 1: "1x20", SOURCES % "peer": "0x20", SOURCES % "host_copy": "0x20"}, "4m",
    ),
    Case(
        "RelightOrphanMemory", "somebody's rest", {MEMORY % "orphan": "1000x20"}, "4m",
        {"instance": "n:8001", "device": "gpu0"},
    ),
    Case("RelightOrphanMemory", "guardians", {MEMORY % "orphan": "0x20", MEMORY % "guardian": "1000x20"}, "4m"),
    Case("RelightOrphanMemory", "an engine that is being ended", {MEMORY % "orphan": "0x12 1000x4 0x8"}, "4m"),
    Case(
        "RelightGuardianHitRateLow", "too few guardians",
        {GUARDIAN % "hit": "0+1x2 2x60", GUARDIAN % "miss": "0+1x6 6x60"}, "50m", MODEL, every=60,
    ),
    Case(
        "RelightGuardianHitRateLow", "one of ten",
        {GUARDIAN % "hit": "0+1x9 9x60", GUARDIAN % "miss": "0x3 1x60"}, "50m", every=60,
    ),
    Case(
        "RelightGuardianHitRateLow", "too few to tell",
        {GUARDIAN % "hit": "0x60", GUARDIAN % "miss": "0+1x3 3x60"}, "50m", every=60,
    ),
    Case(
        "RelightSlowPath", "tcp instead of rdma", {SLOW: "_x8 1x8"}, "4m",
        {**MODEL, "taken": "peer_tcp", "expected": "peer_rdma"},
    ),
    Case("RelightSlowPath", "long ago", {SLOW: "_x8 1x120"}, "30m"),
    Case("RelightInstancesFail", "again and again", {FAILURES: "0+1x8"}, "8m", MODEL, every=60),
    Case("RelightInstancesFail", "twice", {FAILURES: "0x4 2x8"}, "8m", every=60),
    Case("RelightEpochChurn", "five leaders", {"relight_epoch": "1x8 2x8 3x8 4x8 5x20"}, "11m", NONE),
    Case("RelightEpochChurn", "an upgrade", {"relight_epoch": "1x8 2x40"}, "11m"),
    Case("RelightSlotsUnseen", "not heard of", {SLOTS % "awaited": "2x20", SLOTS % "lost": "0x20"}, "4m", NONE),
    Case("RelightSlotsUnseen", "lost", {SLOTS % "awaited": "0x20", SLOTS % "lost": "0x4 1x16"}, "4m", NONE),
    Case(
        "RelightSlotsUnseen", "gone for good",
        {SLOTS % "awaited": "0x200", SLOTS % "lost": "1x200", SLOTS % "gone": "4x200"}, "90m", every=60,
    ),
    Case("RelightSlotsUnseen", "a controller begins", {SLOTS % "awaited": "2x4 0x16", SLOTS % "lost": "0x20"}, "4m"),
    Case("RelightInvariantBroken", "once", {BROKEN: "0x8 1x8"}, "4m", {"rule": "only_ready_is_routable"}),
    Case("RelightInvariantBroken", "never", {BROKEN: "0x16"}, "4m"),
    Case(
        "RelightStoreSlow", "most take a second",
        {STORED % "0.5": "0x60", STORED % "1.0": "0+9x60", STORED % "+Inf": "0+10x60"}, "14m", NONE,
    ),
    Case(
        "RelightStoreSlow", "milliseconds",
        {STORED % "0.01": "0+10x60", STORED % "1.0": "0+10x60", STORED % "+Inf": "0+10x60"}, "14m",
    ),
    Case("RelightControllerGone", "gateways alone", {GATEWAY: "1x20"}, "4m", NONE),
    Case("RelightControllerGone", "it leads", {"relight_epoch": "3x20"}, "4m"),
    Case("RelightDetached", "a gateway", {GATEWAY: "1x4 0x16"}, "4m", {"job": "gateway", "instance": "g:8400"}),
    Case(
        "RelightDetached", "an agent", {AGENT: "1x4 0x16", GATEWAY: "1x20"}, "4m",
        {"job": "agent", "instance": "n:8001"},
    ),
    Case("RelightDetached", "both hear it", {AGENT: "1x20", GATEWAY: "1x20"}, "4m"),
    Case("RelightDetached", "a controller is replaced", {AGENT: "1x8 0x2 1x10", GATEWAY: "1x20"}, "4m"),
    Case(
        "RelightFirstByteBudgetFast", "every other one is slow",
        {FIRST_BYTES: "0+60x120", FAST_BYTES: "0+30x120"}, "100m", MODEL, every=60,
    ),
    Case(
        "RelightFirstByteBudgetFast", "it was, and is no more",
        {FIRST_BYTES: "0+60x120", FAST_BYTES: "0+30x80 2460+60x40"}, "100m", every=60,
    ),
    Case(
        "RelightFirstByteBudgetFast", "one of ten is slow",
        {FIRST_BYTES: "0+60x120", FAST_BYTES: "0+54x120"}, "100m", every=60,
    ),
    Case(
        "RelightFirstByteBudgetSlow", "one of ten is slow",
        {FIRST_BYTES: "0+60x420", FAST_BYTES: "0+54x420"}, "400m", MODEL, every=60,
    ),
    Case(
        "RelightFirstByteBudgetSlow", "as it should be",
        {FIRST_BYTES: "0+1000x420", FAST_BYTES: "0+995x420"}, "400m", every=60,
    ),
)  # fmt: skip
