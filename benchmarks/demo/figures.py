"""The demo's comparisons: floor, decode share, same tokens, divergences from plain serving."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from engine import complete, first_token

WORDS = (
    "river", "stone", "window", "garden", "winter", "letter", "music", "silver", "morning", "forest", "bridge",
    "candle", "harbour", "mountain", "paper", "summer", "island", "mirror", "ocean", "pencil",
)  # fmt: skip
RUNS = 5
NEAR_TIE = 0.1
"""Nats: where plain serving's two best tokens are closer than this, either is right."""


def unseen(seed: str) -> str:
    """A prompt of ten words that was never sent before; all are of about equal length."""
    return " ".join(random.Random(seed).choices(WORDS, k=9)) + f" {random.Random(seed + 'n').randrange(10**6):06d}"


def copy_seconds(count: int) -> float:
    """One thread copies `count` bytes from a shared mapping into resident memory: median of 5."""
    descriptor = os.memfd_create("floor")
    os.ftruncate(descriptor, count)
    with mmap.mmap(descriptor, count) as source, mmap.mmap(-1, count) as target:
        os.close(descriptor)
        for region in (source, target):
            region[:] = b"\1" * count
        from_, to = (ctypes.addressof(ctypes.c_char.from_buffer(r)) for r in (source, target))
        times = []
        for _ in range(RUNS):
            begun = time.perf_counter()
            ctypes.memmove(to, from_, count)
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def first_token_seconds(gateway: str, label: str) -> float:
    """First token of an awake replica through the gateway, for unseen prompts: median of 5."""
    times = []
    for n in range(RUNS):
        begun = time.perf_counter()
        with first_token(gateway, unseen(f"{label} {n} {time.time_ns()}"), 4):
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def decode_share(woken: str, plain: str) -> tuple[float, list[float], list[float]]:
    """Tokens per second of the woken replica over plain serving's: medians of five interleaved runs of 128 tokens."""
    prompt = "Once upon a time there was"
    speeds: dict[str, list[float]] = {woken: [], plain: []}
    for url in (woken, plain):
        complete(url, prompt, 16)
    for _ in range(RUNS):
        for url in (woken, plain):
            begun = time.perf_counter()
            complete(url, prompt, 128)
            speeds[url].append(128 / (time.perf_counter() - begun))
    return statistics.median(speeds[woken]) / statistics.median(speeds[plain]), speeds[woken], speeds[plain]


def tokens_of(url: str, prompts: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    """32 greedy tokens for each prompt, one at a time."""
    return [complete(url, prompt, 32, **more) for prompt in prompts]


def divergences(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    """Prompts whose tokens leave plain serving's at a place where it was sure: its two best differ by > 0.1 nats."""
    found = []
    for n, (a, b) in enumerate(zip(ours, plain, strict=True)):
        for at, (x, y) in enumerate(zip(a["token_ids"], b["token_ids"], strict=True)):
            if x != y:
                best = sorted(b["logprobs"]["top_logprobs"][at].values(), reverse=True)
                if best[0] - best[1] > NEAR_TIE:
                    found.append(f"prompt {n} token {at}: {x} not {y}, margin {best[0] - best[1]:.3f}")
                break
    return found


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """{n, median, worst} in seconds; None where nothing was measured."""
    if not values:
        return {"n": 0, "median": None, "worst": None}
    return {"n": len(values), "median": round(statistics.median(values), 4), "worst": round(max(values), 4)}
