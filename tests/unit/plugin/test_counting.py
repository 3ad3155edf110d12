"""What an engine runs is counted step by step; what Relight itself asks of it is not."""

from __future__ import annotations

from types import SimpleNamespace

from relight.core.shapes import OWN_REQUEST
from relight.plugin.counting import Counter, Counting


def _step(new: dict[str, int] | None = None, running: tuple[str, ...] = ()) -> SimpleNamespace:
    scheduled = {**dict.fromkeys(running, 1), **(new or {})}
    fresh = [SimpleNamespace(prompt_token_ids=[7] * tokens) for tokens in (new or {}).values()]
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()), num_scheduled_tokens=scheduled, scheduled_new_reqs=fresh
    )


def test_steps_and_prompts_are_counted_by_size() -> None:
    counter = Counter()
    counter.step(_step({"cmpl-a": 5}))
    counter.step(_step({"cmpl-b": 100}, ("cmpl-a",)))
    counter.step(_step(running=("cmpl-a", "cmpl-b")))
    assert counter.counts() == {"steps": {"2": 1, "8": 1, "104": 1}, "prompts": {"8": 1, "128": 1}}


def test_requests_of_relights_own_and_empty_steps_are_not_counted() -> None:
    counter, own = Counter(), f"cmpl-{OWN_REQUEST}-1-0"
    counter.step(_step({own: 8}))
    counter.step(_step(running=(own,)))
    counter.step(_step())
    assert counter.counts() == {"steps": {}, "prompts": {}}


def test_a_worker_runs_each_step_and_counts_those_after_its_start() -> None:
    class Engine:
        def execute_model(self, scheduler_output: SimpleNamespace) -> int:
            return int(scheduler_output.total_num_scheduled_tokens)

    class Worker(Counting, Engine):
        pass

    worker = Worker()
    assert worker.execute_model(_step({"warm-up": 4})) == 4
    worker._relight_counter = Counter()
    assert worker.execute_model(_step({"cmpl-a": 4})) == 4
    assert worker.relight_shapes() == {"steps": {"4": 1}, "prompts": {"4": 1}}
