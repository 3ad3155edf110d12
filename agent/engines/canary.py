"""The canary of engines that answer by token ids: what is asked, and how an answer is held to the one known. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relight.agent.engines.base import Proof, ProofFailed

PROMPT = (1, 17, 5, 99, 42, 7, 250, 3)
"""Token ids that every vocabulary has; what they mean does not matter, only that the answer is repeatable."""
WARM_UP_TOKENS = 4
"""That a warm-up request generates: a prompt's step and a few of decoding."""
_VOCABULARY = range(3, 251)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated greedily after a prompt: ids, and the log-probability of each in nats."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Answer:
        """As it travels in JSON. Raises KeyError, TypeError, ValueError."""
        return cls(
            tuple(map(int, said["prompt_token_ids"])),
            tuple(map(int, said["token_ids"])),
            tuple(map(float, said["logprobs"])),
        )


def filler(tokens: int) -> list[int]:
    """A prompt of so many tokens, at least one."""
    return [_VOCABULARY[n % len(_VOCABULARY)] for n in range(max(tokens, 1))]


def finite(logprobs: Sequence[float]) -> None:
    """Raises ProofFailed for what weights out of order make: not a number, or an infinite one."""
    if not all(map(math.isfinite, logprobs)):
        raise ProofFailed("the engine's log-probabilities are not finite")


def hold(want: Answer, tokens: Sequence[int], logprobs: Sequence[float], tolerance: float) -> Proof:
    """The proof that an engine answers as `want` does, to `tolerance` nats. Raises ProofFailed where they part."""
    for at, (got, expected) in enumerate(zip(tokens, want.token_ids, strict=False)):
        if got != expected:
            raise ProofFailed(f"token {at} is {got}, the source's is {expected}")
    if len(tokens) != len(want.token_ids):
        raise ProofFailed(f"{len(tokens)} tokens came, the source's canary has {len(want.token_ids)}")
    largest = max((abs(a - b) for a, b in zip(logprobs, want.logprobs, strict=True)), default=0.0)
    if not largest <= tolerance:
        raise ProofFailed(f"log-probabilities differ by {largest:.3f} nats, at most {tolerance:g} are allowed")
    return Proof(len(tokens), largest)
