"""What a model's own record says of its settings: sizes of graphs, limits of batches, guardians, the mode. Pure, and
told only: nothing is ever applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from relight.controller.doctor.arguments import Arguments
from relight.controller.flight.predict import KEPT, recent_median
from relight.controller.flight.timeline import Timeline
from relight.controller.plan.modes import STARTS
from relight.core.records import Mode, ModelSpec, Shapes
from relight.core.shapes import LEAST_PROMPTS, PROMPTS, STEPS, bucket, weight

LARGEST_GRAPH = 512
"""vLLM captures none larger by default."""
DEFAULT_SIZES = 51
COVERED = 0.99
AT_LIMIT = 0.05
"""Share of steps at the limit of sequences from which it holds requests up."""
LEAST_STARTS = 3
FASTER = 0.8


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One setting that the record speaks for changing."""

    model: str
    setting: str
    now: str
    suggested: str
    evidence: str


def suggest(spec: ModelSpec, kind: str, starts: Iterable[Timeline], shapes: Shapes | None) -> tuple[Suggestion, ...]:
    """What the record of one model speaks for; `kind` is that of the devices it ran on, empty where that is unknown."""
    own = sorted((t for t in starts if t.model == spec.key and t.ok), key=lambda t: t.ended_at)
    known = shapes if shapes is not None and weight(shapes) >= LEAST_PROMPTS else None
    found = [_guardians(spec, own), _mode(spec, own)]
    if known is not None and spec.engine == "vllm":
        arguments = Arguments(spec.args)
        if kind not in ("", "cpu"):
            found.append(_graphs(spec, arguments, known.steps))
        found += [_sequences(spec, arguments, known.steps), _batch(spec, arguments, known.prompts)]
    return tuple(s for s in found if s is not None)


def _graphs(spec: ModelSpec, arguments: Arguments, steps: Mapping[int, float]) -> Suggestion | None:
    """The fewest sizes that nearly all steps with graphs ran at."""
    small = {size: w for size, w in steps.items() if size <= LARGEST_GRAPH}
    whole = sum(small.values())
    chosen: list[int] = []
    reached = 0.0
    for size, w in sorted(small.items(), key=lambda pair: (-pair[1], pair[0])):
        if reached >= COVERED * whole:
            break
        chosen.append(size)
        reached += w
    now = arguments.text("--cudagraph-capture-sizes")
    told = len(now.split()) if now else DEFAULT_SIZES
    if not chosen or 2 * len(chosen) > told:
        return None
    evidence = f"{reached / whole:.1%} of the steps that graphs are for ran at {len(chosen)} sizes; {told} are captured"
    sizes = " ".join(map(str, sorted(chosen)))
    return Suggestion(spec.key, "args: --cudagraph-capture-sizes", now or "the engine's own", sizes, evidence)


def _sequences(spec: ModelSpec, arguments: Arguments, steps: Mapping[int, float]) -> Suggestion | None:
    limit = arguments.number("--max-num-seqs")
    whole = sum(steps.values())
    if limit is None or not whole:
        return None
    share = steps.get(STEPS[bucket(STEPS, int(limit))], 0.0) / whole
    if share < AT_LIMIT:
        return None
    evidence = f"{share:.0%} of the steps ran at the limit: requests waited for a place among {limit:.0f}"
    return Suggestion(spec.key, "args: --max-num-seqs", f"{limit:.0f}", f"{2 * limit:.0f}", evidence)


def _batch(spec: ModelSpec, arguments: Arguments, prompts: Mapping[int, float]) -> Suggestion | None:
    limit = arguments.number("--max-num-batched-tokens")
    whole = sum(prompts.values())
    if limit is None or not whole:
        return None
    reached = 0.0
    for size in sorted(prompts):
        reached += prompts[size]
        if reached >= 0.9 * whole:
            break
    if size <= limit:
        return None
    above = sum(w for s, w in prompts.items() if s > limit) / whole
    wanted = PROMPTS[bucket(PROMPTS, size)]
    evidence = f"{above:.0%} of the prompts are longer and take several steps; nine of ten have at most {wanted} tokens"
    return Suggestion(spec.key, "args: --max-num-batched-tokens", f"{limit:.0f}", str(wanted), evidence)


def _guardians(spec: ModelSpec, own: Sequence[Timeline]) -> Suggestion | None:
    """As many more as replicas were started at once for want of one."""
    replicas = [t for t in own[-KEPT:] if not t.slept]
    wakes = [t for t in replicas if t.mode is Mode.GUARDIAN]
    missed = [t for t in replicas if t.mode is not Mode.GUARDIAN]
    if len(replicas) < LEAST_STARTS or not missed or spec.mode not in (Mode.AUTO, Mode.GUARDIAN):
        return None
    restock = max((t.seconds for t in own if t.slept), default=max(t.seconds for t in missed))
    together = max(sum(a.begun_at <= b.begun_at < a.ended_at + restock for b in missed) for a in missed)
    wanted = min(spec.guardians.replicas + together, spec.max_replicas)
    if wanted <= spec.guardians.replicas:
        return None
    took = f"{median(t.seconds for t in missed):.2f} s"
    against = f", {median(t.seconds for t in wakes):.2f} s with one" if wakes else ""
    evidence = f"{len(missed)} of the last {len(replicas)} starts found no guardian and took {took}{against}"
    told = f"{evidence}; up to {together} came at once"
    return Suggestion(spec.key, "guardians.replicas", str(spec.guardians.replicas), str(wanted), told)


def _mode(spec: ModelSpec, own: Sequence[Timeline]) -> Suggestion | None:
    """Another way of starting that was faster each time it was tried, where the one in use was tried as well."""
    took = {mode: [t.seconds for t in own if t.mode is mode and not t.slept][-KEPT:] for mode in STARTS}
    measured = {mode: recent_median(s) for mode, s in took.items() if len(s) >= LEAST_STARTS}
    used = next((t.mode for t in reversed(own) if t.mode in STARTS and not t.slept), None)
    if used not in measured:
        return None
    best = min(measured, key=lambda mode: measured[mode])
    if best is used or measured[best] > FASTER * measured[used]:
        return None
    told = ", ".join(f"{mode} {seconds:.2f} s ({len(took[mode])} starts)" for mode, seconds in measured.items())
    return Suggestion(spec.key, "mode", str(spec.mode), str(best), f"medians: {told}")
