"""`vllm serve` as far as agents call it: weights of real bytes, sources, refills and sleep are Relight's own.

The model's config.json says how many MiB there are. `GET /brought` tells how many bytes of the last refill came from
whom, while it is under way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import zlib
from collections.abc import Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from relight.core.clock import SystemClock
from relight.core.fingerprint import Fingerprint
from relight.plugin import settings as environment
from relight.plugin.control import ControlServer
from relight.plugin.operations import Operations
from relight.plugin.orders import ModelMemory, Order, Restored
from relight.plugin.pages import HostPages
from relight.plugin.residency import Residence, Residency
from relight.plugin.settings import Settings
from relight.plugin.stages import Stages
from relight.transfer.manifest import TensorEntry, WeightManifest
from relight.transfer.request import OnProgress, Progress
from relight.transfer.segment import Segment
from relight.transfer.verify import blocks_of

CLOCK = SystemClock()
LAYOUT = {"engine": "vllm double"}
TENSOR = 1 << 20
METRICS = ("num_requests_running", "num_requests_waiting", "generation_tokens_total", "prompt_tokens_total")


class Weights:
    """Tensors of a MiB each, whose bytes are the same in every process."""

    def __init__(self, count: int) -> None:
        self.segment = Segment("double", count * TENSOR)
        self.segment.populate(0, self.segment.bytes)
        self.table = {
            f"t{n}": TensorEntry(f"t{n}", "uint8", (TENSOR,), (1,), n * TENSOR, TENSOR, (), b"") for n in range(count)
        }

    def load(self, path: str = "") -> None:
        for n in range(len(self.table)):
            self.segment.view[n * TENSOR : (n + 1) * TENSOR] = random.Random(n).randbytes(TENSOR)

    def describe(self, revision: str) -> WeightManifest:
        view = self.segment.view
        tensors = tuple(replace(t, blocks=blocks_of(view[t.offset : t.offset + t.bytes])) for t in self.table.values())
        prints = Fingerprint(LAYOUT, {"revision": revision}, {"max_model_len": "512"})
        return WeightManifest(prints, 0, self.segment.bytes, tensors)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """What it generates: of the weights alone, so that wrong ones are found out."""
        seed = zlib.crc32(bytes(self.segment.view[:: TENSOR // 4]), sum(prompt))
        return [(seed >> n) % 1000 for n in range(count)]


class Watched(Residency):
    """Tells how far a refill is while it is under way."""

    brought: Mapping[str, int] = {}

    def refill(self, order: Order, progress: OnProgress) -> Restored:
        def both(now: Progress) -> None:
            self.brought = now.holders
            progress(now)

        return super().refill(order, both)

    def open_source(self, key: str) -> dict[str, object]:
        opened = super().open_source(key)
        for listener in self._doors._listeners:
            if listener.kind in os.environ.get("DOUBLE_CLOSES", ""):
                # Still told of, as behind a firewall: whoever comes finds nobody.
                listener.release()
        return opened

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.brought = {}


class Handler(BaseHTTPRequestHandler):
    """The routes of one engine."""

    protocol_version = "HTTP/1.1"
    residency: Watched
    weights: Weights

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def _say(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _json(self, body: object) -> None:
        self._say(json.dumps(body).encode())

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/health":
                self._say(b"")
            case "/metrics":
                self._say("".join(f"vllm:{name} 0\n" for name in METRICS).encode())
            case "/is_sleeping":
                self._json({"is_sleeping": self.residency.state is not Residence.AWAKE})
            case "/brought":
                self._json(dict(self.residency.brought))
            case _:
                self._say(b"", 404)

    def do_POST(self) -> None:
        where = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))) or b"{}")
        match where.path:
            case "/sleep":
                self.residency.sleep(int(parse_qs(where.query)["level"][0]))
                self._json({})
            case "/wake_up":
                self.residency.resume()
                self._json({"status": "awake"})
            case "/collective_rpc":
                self._json({"results": [0]})
            case "/v1/completions":
                ids = self.weights.answer(body["prompt"], body["max_tokens"])
                self._json({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}]})
            case _:
                self._say(b"", 404)


def serve(own: Settings, model: Path, host: str, port: int) -> None:
    weights = Weights(json.loads((model / "config.json").read_text())["mebibytes"])
    if not own.awaits:
        weights.load()
    pages = HostPages(own.instance, weights.segment, lambda: None, CLOCK)
    memory = ModelMemory(
        pages, weights.table, LAYOUT, weights.describe, weights.load, lambda scalars: None, lambda: None
    )  # fmt: skip
    residency = Watched(own, 0, memory, CLOCK)
    operations = Operations(
        residency, Stages(CLOCK), LAYOUT, lambda: (weights.segment.resident_bytes(), 0),
        lambda: {"steps": {}, "prompts": {}}, weight_bytes=len(weights.table) * TENSOR,
    )  # fmt: skip
    ControlServer(own.control_socket(0), operations.table())
    if own.awaits:
        residency.fill(own.start_seconds)
        residency.settle()
    handler = type("Engine", (Handler,), {"residency": residency, "weights": weights})
    ThreadingHTTPServer((host, port), handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    told, _ = parser.parse_known_args()
    serve(environment.read(os.environ), told.model, told.host, told.port)


if __name__ == "__main__":
    main()
