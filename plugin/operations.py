"""What an agent may ask of the part of Relight inside an engine, by name, on its control socket (control.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from relight.core.fingerprint import digest
from relight.core.records import Deal, RungKind, SourceRef
from relight.plugin.control import Operation, Progress
from relight.plugin.orders import Order
from relight.plugin.residency import Residency
from relight.plugin.stages import Stages
from relight.transfer import request as transfer
from relight.transfer.manifest import Canary

PROGRESS_STEP = 16 << 20


class Operations:
    """Those of one member. Each takes plain arguments and answers with plain data.

    `resident` says how many bytes of weights and KV cache the member holds now, `shapes` what ran since its start,
    `direct` by RDMA card how it reaches the device's memory, or why it does not; `unfit` is the memory's own.
    """

    def __init__(
        self, residency: Residency, stages: Stages, layout: Mapping[str, str], resident: Callable[[], tuple[int, int]],
        shapes: Callable[[], object], *, weight_bytes: int, unfit: str = "",
        direct: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._residency, self._stages, self._layout = residency, stages, layout
        self._resident, self._shapes = resident, shapes
        self._weight_bytes, self._unfit, self._direct = weight_bytes, unfit, dict(direct or {})

    def table(self) -> dict[str, Operation]:
        """By name, as the control socket serves them."""
        residency = self._residency
        return {
            "describe": lambda a, _: self._describe(),
            "digests": lambda a, _: residency.digests(),
            "resident": lambda a, _: self._held(),
            "set_canary": lambda a, _: self._set_canary(a),
            "canary": lambda a, _: self._canary(),
            "open_source": lambda a, _: self._open_source(str(a["key"])),
            "open_relay": lambda a, _: self._open_relay(str(a["key"])),
            "close_source": lambda a, _: residency.close_source(float(a["deadline_seconds"])),
            "refill": self._refill,
            "suspend": lambda a, _: residency.suspend(),
            "shapes": lambda a, _: self._shapes(),
        }

    def _describe(self) -> object:
        manifest = self._residency.source.manifest
        return {
            "fingerprint": asdict(manifest.fingerprint),
            "weight_bytes": self._weight_bytes,
            "kv_bytes": self._resident()[1],
            "state": str(self._residency.state),
            "level": self._residency.level,
            "phases": [asdict(p) for p in self._stages.phases],
            "unfit": self._unfit,
            "direct": self._direct,
        }

    def _open_source(self, key: str) -> object:
        opened = self._residency.open_source(key)
        source = self._residency.source
        return opened | {
            "manifest_digest": source.manifest_digest,
            "content_digest": source.manifest.content_digest(),
            "layout_digest": digest(self._layout),
            "weight_bytes": self._weight_bytes,
        }

    def _open_relay(self, key: str) -> object:
        # What it will hold is not known before it is filled.
        opened = self._residency.open_relay(key)
        unknown = {"manifest_digest": "", "content_digest": "", "weight_bytes": 0}
        return opened | unknown | {"layout_digest": digest(self._layout)}

    def _held(self) -> object:
        # A segment whose pages no process maps is counted by nobody's proportional set size.
        weights, cache = self._resident()
        return {"weight_bytes": weights, "kv_bytes": cache, "host_copy_bytes": self._residency.host_copy_bytes}

    def _set_canary(self, arguments: Mapping[str, Any]) -> None:
        self._residency.set_canary(
            Canary(
                tuple(map(int, arguments["prompt_token_ids"])),
                tuple(map(int, arguments["token_ids"])),
                tuple(map(float, arguments["logprobs"])),
            )
        )

    def _canary(self) -> object:
        canary = self._residency.source.manifest.canary
        return None if canary is None else asdict(canary)

    def _refill(self, arguments: Mapping[str, Any], progress: Progress) -> object:
        told = 0

        def tell(now: transfer.Progress) -> None:
            nonlocal told
            if now.bytes - told >= PROGRESS_STEP or now.bytes == now.total:
                told = now.bytes
                progress({"bytes": now.bytes, "total": now.total, "bytes_per_second": now.bytes_per_second})

        sources = tuple(SourceRef(**{**s, "parts": tuple(s.get("parts", ()))}) for s in arguments["sources"])
        deal = arguments.get("deal")
        order = Order(
            RungKind(arguments["kind"]), str(arguments["revision"]), sources, str(arguments["path"]),
            bool(arguments["share"]), None if deal is None else Deal(**deal),
        )  # fmt: skip
        got = self._residency.refill(order, tell)
        return {
            "bytes": got.bytes,
            "phases": [asdict(p) for p in got.phases],
            "detail": got.detail,
            "brought": dict(got.brought),
            "canary": self._canary(),
        }
