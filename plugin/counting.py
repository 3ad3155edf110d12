"""Counts what an engine runs, by size: one list lookup a step, and nothing is kept of any request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from relight.core.shapes import OWN_REQUEST, PROMPTS, STEPS, bucket


class Step(Protocol):
    """What vLLM's scheduler says of a step, as far as it is counted."""

    total_num_scheduled_tokens: int
    num_scheduled_tokens: Mapping[str, int]
    """By request."""
    scheduled_new_reqs: Sequence[Any]


class Counter:
    """Since it was made. Written by the engine's own thread alone; whoever reads meanwhile may miss the last step."""

    def __init__(self) -> None:
        self._steps, self._prompts = [0] * len(STEPS), [0] * len(PROMPTS)

    def step(self, step: Step) -> None:
        """Counts one step, unless it was made for a request of Relight's own."""
        for request in step.num_scheduled_tokens:
            # Before an engine is routed to, its steps are Relight's alone; afterwards none is.
            if OWN_REQUEST in request:
                return
            break
        else:
            return
        self._steps[bucket(STEPS, step.total_num_scheduled_tokens)] += 1
        for new in step.scheduled_new_reqs:
            if new.prompt_token_ids:
                self._prompts[bucket(PROMPTS, len(new.prompt_token_ids))] += 1

    def counts(self) -> dict[str, dict[str, int]]:
        """Steps and prompts by the upper end of their bucket, as JSON has them; sizes that never came are left out."""
        return {
            name: {str(end): count for end, count in zip(ends, counts, strict=True) if count}
            for name, ends, counts in (("steps", STEPS, self._steps), ("prompts", PROMPTS, self._prompts))
        }


class Counting:
    """Mixed into the workers, ahead of vLLM's own class."""

    _relight_counter: Counter | None = None
    """Made when the start is over: what it runs to warm itself up says nothing of requests."""

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._relight_counter is not None:
            self._relight_counter.step(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def relight_shapes(self) -> dict[str, dict[str, int]]:
        """What ran since the start, by size."""
        return self._relight_counter.counts() if self._relight_counter else {"steps": {}, "prompts": {}}
