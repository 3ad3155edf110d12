"""The ranks of one vLLM engine on one node: each has weights of its own, and takes the agent's calls on its own socket.

What concerns weights goes to all ranks; rank r of a receiver reads from rank r of its source. Where an answer is one
for the whole engine (addresses, digests), the ranks' parts stand in their order, separated by commas.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from relight.agent.engines.base import Refill
from relight.agent.engines.vllm_control import call
from relight.core.errors import LocalFault, ModelDirty
from relight.core.records import Phase, Rung, SourceOffer, SourceRef

SEPARATOR = ","


class Ranks:
    """The control sockets of `count` ranks in `directory`."""

    def __init__(self, directory: Path, count: int) -> None:
        self._sockets = [directory / f"worker-{rank}.sock" for rank in range(count)]

    @property
    def count(self) -> int:
        return len(self._sockets)

    async def first(self, operation: str, deadline: float) -> Any:
        """Asks rank 0, for what is the same at all of them."""
        return await call(self._sockets[0], operation, deadline=deadline)

    async def all(
        self, operation: str, deadline: float, arguments: Mapping[str, object] | Sequence[Mapping[str, object]] = (),
        on_progress: Callable[[int, Any], None] = lambda rank, said: None,
    ) -> list[Any]:  # fmt: skip
        """The answers in the order of ranks; `arguments` are one for all or one for each. Waits for every rank.

        Raises the error of a rank whose model is dirty before that of one whose is not.
        """
        each = [arguments] * self.count if isinstance(arguments, Mapping) else list(arguments)

        def one(rank: int) -> Awaitable[Any]:
            given = dict(each[rank]) if each else None
            return call(
                self._sockets[rank], operation, given, deadline=deadline, on_progress=partial(on_progress, rank)
            )  # fmt: skip

        calls = [one(rank) for rank in range(self.count)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        errors = [f for f in found if isinstance(f, BaseException)]
        if errors:
            raise next((e for e in errors if isinstance(e, ModelDirty)), errors[0])
        return list(found)


def split(parts: str, count: int, what: str) -> list[str]:
    """The parts of `count` ranks. Raises LocalFault when there are more or fewer."""
    found = parts.split(SEPARATOR) if parts else [""] * count
    if len(found) != count:
        raise LocalFault(f"the source has {what} of {len(found)} ranks, this engine has {count}")
    return found


def refill_arguments(rung: Rung, revision: str, path: str, count: int, share: bool) -> list[dict[str, object]]:
    """What each rank is told about a rung. Raises LocalFault when the source is divided otherwise."""
    deal = None if rung.deal is None else asdict(rung.deal)
    told: dict[str, object] = {"kind": rung.kind, "revision": revision, "share": share, "deal": deal}
    if rung.source is None:
        return [{**told, "path": path, "sources": []}] * count
    by_source = [_by_rank(source, count) for source in (rung.source, *rung.helpers)]
    return [{**told, "path": "", "sources": [ranks[rank] for ranks in by_source]} for rank in range(count)]


def _by_rank(source: SourceRef, count: int) -> list[dict[str, object]]:
    addresses = split(source.address, count, "addresses")
    digests = split(source.manifest_digest, count, "manifests")
    # An engine that outlived the agent that started it may not know what it is not asked for.
    dealt = {"filling": source.filling, "parts": source.parts} if source.filling or source.parts else {}
    plain = {name: value for name, value in asdict(source).items() if name not in ("filling", "parts")} | dealt
    return [
        {**plain, "address": address, "manifest_digest": digest}
        for address, digest in zip(addresses, digests, strict=True)
    ]


def by_name(said: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    """The ranks' phases as one: work of one name lasts from the first rank's begin to the last one's end."""
    phases: dict[str, Phase] = {}
    for phase in (Phase(**p) for s in said for p in s["phases"]):
        known = phases.get(phase.name)
        phases[phase.name] = phase if known is None else Phase(
            phase.name, min(known.start, phase.start), max(known.end, phase.end), known.detail
        )  # fmt: skip
    return tuple(phases.values())


def refilled(said: Sequence[Mapping[str, Any]]) -> Refill:
    """The ranks' refills as one."""
    detail = str(said[0]["detail"]) + (f", each of {len(said)} ranks" if len(said) > 1 else "")
    brought = Counter[str]()
    for one in said:
        brought.update({name: int(count) for name, count in one.get("brought", {}).items()})
    return Refill(sum(int(s["bytes"]) for s in said), by_name(said), detail, dict(brought))


def offer(said: Sequence[Mapping[str, Any]], key: str, rate_limit: int | None) -> SourceOffer:
    """The ranks' sources as one; `rate_limit` is that of all ranks. Raises LocalFault when they are of different
    generations."""
    generations = {int(s["generation"]) for s in said}
    if len(generations) != 1:
        raise LocalFault(f"the ranks' sources are of generations {sorted(generations)}")
    return SourceOffer(
        generation=generations.pop(),
        manifest_digest=_joined(said, "manifest_digest"),
        content_digest=_together(said, "content_digest"),
        layout_digest=_together(said, "layout_digest"),
        addresses=_addresses(said),
        closed={k: why for s in said for k, why in s["closed"].items()},
        weight_bytes=sum(int(s["weight_bytes"]) for s in said),
        grant_key=key,
        rate_limit=rate_limit,
    )


def _addresses(said: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the transports that all ranks serve: who reads one rank by it reads all of them."""
    served = set.intersection(*(set(s["addresses"]) for s in said))
    return {kind: SEPARATOR.join(str(s["addresses"][kind]) for s in said) for kind in sorted(served)}


def _joined(said: Sequence[Mapping[str, Any]], name: str) -> str:
    return SEPARATOR.join(str(s[name]) for s in said)


def _together(said: Sequence[Mapping[str, Any]], name: str) -> str:
    """One digest for all ranks; of one rank its own."""
    if len(said) == 1:
        return str(said[0][name])
    return hashlib.sha256(_joined(said, name).encode()).hexdigest()[:32]
