"""Steady requests through the gateway: one a second, eight tokens, every answer compared with what it must be."""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from engine import NAME

PROMPTS = (
    "1, 2, 3, 4, 5,", "10, 20, 30, 40, 50,", "100 200 300 400",
    "a, b, c, d, e, f,", "5 10 15 20 25", "1, 10, 100, 1000,",
)  # fmt: skip
"""The model is sure of every token that follows (by 1 nat or more): what else is in the batch, whose rounding differs
with its size, cannot make another text right."""
TOKENS = 8
PERIOD = 1.0
DEADLINE = 60.0
"""Seconds until the process must have begun; it has three times as long to get its last answers."""


class Load:
    """Open-loop: a slow answer does not delay the next request. An error, a cut stream and a wrong text all fail.

    The requests come from a process of their own, so that they do not take the interpreter from the client that wakes
    are timed by.
    """

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self.sent = 0
        self.failures: list[str] = []
        self._expected = {p: ask(httpx.Client(timeout=120.0, trust_env=False), gateway, p) for p in PROMPTS}

    def __enter__(self) -> Load:
        spawn = multiprocessing.get_context("spawn")
        self._stop, self._told = spawn.Event(), spawn.Queue()
        arguments = (self._gateway, self._expected, self._stop, self._told)
        self._process = spawn.Process(target=_drive, args=arguments, name="load", daemon=True)
        self._process.start()
        self._told.get(timeout=DEADLINE)  # its requests begin now
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        sent, failures = self._told.get(timeout=3 * DEADLINE)
        self._process.join(30)
        self.sent += sent
        self.failures += failures


def ask(http: httpx.Client, gateway: str, prompt: str) -> str:
    """The text of one streamed answer. Raises RuntimeError unless it came whole."""
    body: dict[str, Any] = {
        "model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    text, done = "", False
    with http.stream("POST", f"{gateway}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.read().decode()[:200]}")
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    if not done:
        raise RuntimeError("the stream was cut")
    return text


def _drive(gateway: str, expected: dict[str, str], stop: Any, told: Any) -> None:
    """The process: tells once that it begins, and at the end what it sent and what failed."""
    http = httpx.Client(timeout=120.0, trust_env=False)
    failures: list[str] = []

    def one(prompt: str) -> None:
        try:
            got = ask(http, gateway, prompt)
            failure = "" if got == expected[prompt] else f"{prompt!r}: {got!r}, not {expected[prompt]!r}"
        except (httpx.HTTPError, RuntimeError, KeyError, ValueError) as error:
            failure = f"{prompt!r}: {type(error).__name__}: {error}"
        if failure:
            failures.append(f"at {time.strftime('%H:%M:%S')} {failure}")

    told.put("begun")
    begun, number = time.monotonic(), 0
    with ThreadPoolExecutor(64) as pool:
        while not stop.wait(max(begun + number * PERIOD - time.monotonic(), 0)):
            pool.submit(one, PROMPTS[number % len(PROMPTS)])
            number += 1
    told.put((number, failures))
