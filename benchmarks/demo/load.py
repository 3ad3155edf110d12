"""Steady requests through the gateway: one a second, eight tokens, every answer compared with what it must be."""

from __future__ import annotations

import json
import threading
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


class Load:
    """Open-loop: a slow answer does not delay the next request. An error, a cut stream and a wrong text all fail."""

    def __init__(self, gateway: str) -> None:
        self._url = f"{gateway}/v1/completions"
        self._http = httpx.Client(timeout=120.0, trust_env=False)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.sent = 0
        self.failures: list[str] = []
        self._expected = {p: self._ask(p) for p in PROMPTS}

    def _ask(self, prompt: str) -> str:
        body: dict[str, Any] = {
            "model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        text, done = "", False
        with self._http.stream("POST", self._url, json=body) as answer:
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

    def _one(self, prompt: str) -> None:
        try:
            got = self._ask(prompt)
            failure = "" if got == self._expected[prompt] else f"{prompt!r}: {got!r}, not {self._expected[prompt]!r}"
        except (httpx.HTTPError, RuntimeError, KeyError, ValueError) as error:
            failure = f"{prompt!r}: {type(error).__name__}: {error}"
        if failure:
            with self._lock:
                self.failures.append(f"at {time.strftime('%H:%M:%S')} {failure}")

    def __enter__(self) -> Load:
        self._stop.clear()
        self._pool = ThreadPoolExecutor(64)
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        begun = time.monotonic()
        number = 0
        while not self._stop.wait(max(begun + number * PERIOD - time.monotonic(), 0)):
            self._pool.submit(self._one, PROMPTS[number % len(PROMPTS)])
            number += 1
            self.sent += 1
