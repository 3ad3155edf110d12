"""The handle on an engine without a part of Relight in it: its memory is managed from here, by the engine's own calls.

    awake -> released(level) -> refilled -> awake        released, refilled -> released (suspend)

What such an engine does not refuse itself is refused here: nothing resumes without a refill, nothing is released or
brought back twice, and a call that nobody heard the answer of ends the engine. Weights are proven by the digests that
the engine computes of its own tensors, held to those of the same content's first load, and by the canary.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relight.agent.engines import canary
from relight.agent.engines.base import EngineFacts, Health, MemberContext, Progress, Proof, ProofFailed, Refill
from relight.agent.engines.canary import Answer
from relight.agent.engines.kept import Content, KeptFile
from relight.core.clock import Clock
from relight.core.errors import Conflict, LocalFault, ModelDirty
from relight.core.fingerprint import Fingerprint, digest
from relight.core.logs import get_logger
from relight.core.records import (
    Endpoint,
    InstanceAssignment,
    OnTimeout,
    Phase,
    Rung,
    RungKind,
    Shapes,
    SourceOffer,
)

log = get_logger("agent.outside")
WEIGHTS = "weights"
"""The tag of memory that a refill is about; the others come back when it is over."""
STALL_SECONDS = 30.0
"""An engine that shows no progress for so long, with requests running, counts as hung."""
_POLL = 0.05


class OutsideHandle(ABC):
    """One member. Subclasses name the engine's calls; the order in which they may be made is here."""

    engine: str
    tags: tuple[str, ...]
    """Names of memory as the engine has them, in the order in which they are brought back after the weights."""
    rungs: frozenset[RungKind] = frozenset({RungKind.HOST_COPY, RungKind.STORAGE, RungKind.DISK})
    no_peers: str
    """Why it neither reads another engine's memory nor lets its own be read."""

    def __init__(self, context: MemberContext, clock: Clock) -> None:
        self._context, self._clock = context, clock
        self._kept = KeptFile(context.directory)
        self._fresh: Mapping[str, str] | None = None
        self._generation = 0
        self._abort = False
        self._progressed: tuple[float, float] = (-1.0, 0.0)

    # ------------------------------------------------------------------ the engine's own calls

    @abstractmethod
    async def _load(self) -> tuple[int, int, float]:
        """(requests that run, that wait, a number that changes while the engine goes on). Raises LocalFault."""

    @abstractmethod
    async def _ready(self) -> bool:
        """Whether it takes requests, asked in a way that runs none. Raises LocalFault when nobody answers."""

    @abstractmethod
    async def _pause(self, *, abort: bool) -> None:
        """No request runs or begins from now on, whatever is sent to it; those that run are cut or kept."""

    @abstractmethod
    async def _release(self, tags: Sequence[str], level: int) -> None:
        """Gives memory back; paused before."""

    @abstractmethod
    async def _bring_back(self, tags: Sequence[str]) -> None:
        """Maps memory again. What it holds is another matter."""

    @abstractmethod
    async def _reload(self, path: str, revision: str, deadline: float) -> None:
        """Reads weights from a checkpoint. Raises LocalFault with the engine's reason."""

    @abstractmethod
    async def _continue(self) -> None:
        """Requests run again."""

    @abstractmethod
    async def _digests(self) -> Mapping[str, str]:
        """Of its tensors as it has them now, by name."""

    @abstractmethod
    async def _generate(self, prompt: Sequence[int], count: int, *, apart: bool) -> tuple[list[int], list[float]]:
        """Greedy ids and their log-probabilities; `apart` shares no cache with other requests."""

    @abstractmethod
    async def _describe(self) -> tuple[Fingerprint, int, int]:
        """(fingerprint without content, bytes of the weights, bytes of the KV cache), awake or not."""

    @abstractmethod
    def _unfit(self, level: int) -> str:
        """Why this process cannot sleep at `level`; empty when it can."""

    @property
    @abstractmethod
    def _endpoint(self) -> Endpoint: ...

    # ------------------------------------------------------------------ a start

    def follow(self, assignment: InstanceAssignment) -> None:
        if assignment != self._context.assignment:
            self._context = replace(self._context, assignment=assignment)

    async def wait_empty(self, deadline_seconds: float, progress: Progress) -> bool:
        return False

    async def wait_ready(self, deadline_seconds: float, progress: Progress) -> None:
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    try:
                        if await self._ready():
                            return
                    except LocalFault:
                        progress(f"{self.engine} starts")
                    # It tells nobody when it is up: its port is asked until it answers.
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            raise LocalFault(f"{self.engine} was not ready after {deadline_seconds:.0f} s; see its log") from error

    async def describe(self) -> EngineFacts:
        fingerprint, weights, cache = await self._describe()
        revision = self._kept.now.revision or self._revision
        return EngineFacts(replace(fingerprint, content={"revision": revision}), self._endpoint, weights, cache)

    async def prove_or_record(self) -> tuple[Proof | None, Phase]:
        if self._revision in self._kept.now.contents:
            return await self.prove()
        begun = self._clock.now()
        digests = self._fresh if self._fresh is not None else await self._digests()
        count = self._context.assignment.spec.proof.tokens
        tokens, logprobs = await self._generate(canary.PROMPT, count, apart=False)
        canary.finite(logprobs)
        self._kept.learned(self._revision, Content(digests, Answer(canary.PROMPT, tuple(tokens), tuple(logprobs))))
        return None, Phase("canary", begun, self._clock.now(), f"recorded, with digests of {len(digests)} tensors")

    async def warm_up(self, prompt_tokens: int) -> None:
        await self._generate(canary.filler(prompt_tokens), canary.WARM_UP_TOKENS, apart=True)

    async def shapes(self) -> Shapes:
        return Shapes(self._clock.now())

    async def complete(self) -> int:
        return 0

    # ------------------------------------------------------------------ nobody reads it

    async def open_source(self) -> SourceOffer:
        """Says what it holds, and that nobody can read it."""
        fingerprint, weights, _ = await self._describe()
        held = self._kept.now.contents.get(self._revision)
        content = _name(held.digests) if held else ""
        self._generation += 1
        closed = dict.fromkeys((kind.transport for kind in RungKind if kind.transport), self.no_peers)
        return SourceOffer(self._generation, content, content, digest(fingerprint.layout), {}, weights, closed)

    async def open_relay(self) -> None:
        """It passes nothing on."""
        return

    async def close_source(self, deadline_seconds: float) -> None:
        """There are no readers."""
        return

    # ------------------------------------------------------------------ a sleep

    async def wait_idle(self, deadline_seconds: float, on_timeout: OnTimeout) -> None:
        self._abort = False
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    running, waiting, _ = await self._load()
                    if not running + waiting:
                        return
                    await asyncio.sleep(_POLL)
        except TimeoutError as error:
            if on_timeout is OnTimeout.WAIT:
                raise LocalFault(f"requests still run after {deadline_seconds:g} s") from error
            self._abort = True

    async def sleep(self, level: int) -> None:
        kept = self._kept.known()
        if kept.released:
            if kept.level == level and set(kept.released) == set(self.tags):
                return
            raise Conflict(f"{self.engine} sleeps at level {kept.level} with {', '.join(kept.released)} released")
        if why := self._unfit(level):
            raise LocalFault(why)
        await self._rest(level, abort=self._abort)

    async def _rest(self, level: int, *, abort: bool) -> None:
        """To sleep from wherever it is. What was released already stays so."""
        await self._pause(abort=abort)
        self._kept.write(paused=True)
        left = [tag for tag in self.tags if tag not in self._kept.now.released]
        if left:
            call = self._release(left, level)
            await self._changing(f"release of {', '.join(left)}", call, released=self.tags, level=level)

    async def suspend(self) -> None:
        kept = self._kept.known()
        # What a failed wake loaded is no copy worth keeping; a copy of before was read and is still there.
        await self._rest(kept.level or 2, abort=True)

    async def _changing(self, what: str, call: Awaitable[None], **after: object) -> None:
        """Makes a call that changes what the engine holds. One that is cut or fails leaves the engine unknown."""
        self._kept.write(unanswered=what)
        await call
        self._kept.write(unanswered="", **after)

    # ------------------------------------------------------------------ a wake

    async def refill(
        self, rung: Rung, content_revision: str, progress: Progress, *, checkpoint: Path | None = None,
        share: bool = False,
    ) -> Refill:  # fmt: skip
        kept = self._kept.known()
        if rung.kind not in self.rungs:
            raise LocalFault(self.no_peers)
        if WEIGHTS not in kept.released and not kept.paused:
            raise Conflict(f"{self.engine} is awake: a refill would overwrite what it serves from")
        own = rung.kind is RungKind.HOST_COPY
        if own and (kept.level != 1 or kept.revision != content_revision):
            raise LocalFault(f"its own copy is of level {kept.level} and revision {kept.revision!r}")
        self._fresh, begun = None, self._clock.now()
        if WEIGHTS in kept.released:
            released = tuple(tag for tag in kept.released if tag != WEIGHTS)
            await self._changing(f"return of {WEIGHTS}", self._bring_back([WEIGHTS]), released=released)
        mapped = self._clock.now()
        path = str(checkpoint or self._context.assignment.spec.uri)
        if not own:
            progress(f"{rung.kind}: {self.engine} reads {path}")
            # Whatever comes of it, the weights are of the old content no longer.
            self._kept.write(revision="")
            try:
                await self._reload(path, content_revision, self._context.assignment.deadline_seconds)
            except LocalFault as fault:
                raise ModelDirty(str(fault), cause=fault) from fault
        pulled = self._clock.now()
        proven = await self._hold_digests(content_revision)
        self._kept.write(revision=content_revision)
        weights = (await self._describe())[1]
        phases = (
            Phase("map", begun, mapped, "weights' pages are back"),
            Phase("pull", mapped, pulled, "brought by the engine's own copy" if own else f"read from {path}"),
            Phase("verify", pulled, self._clock.now(), proven),
        )
        return Refill(weights, phases, proven)

    async def _hold_digests(self, revision: str) -> str:
        """Raises ModelDirty, naming tensors that are not what this content was at its first load."""
        self._fresh = await self._digests()
        known = self._kept.now.contents.get(revision)
        if known is None:
            return f"digests of {len(self._fresh)} tensors taken, the first of this content"
        other = sorted(n for n in {*known.digests, *self._fresh} if known.digests.get(n) != self._fresh.get(n))
        if other:
            shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
            fault = LocalFault(f"{shown}: not what this content was when it was first loaded")
            raise ModelDirty(str(fault), cause=fault)
        return f"digests of {len(self._fresh)} tensors agree"

    async def resume(self) -> Phase:
        begun = self._clock.now()
        kept = self._kept.known()
        if WEIGHTS in kept.released or not kept.revision:
            raise Conflict(f"{self.engine} has no weights: a refill comes first")
        if kept.released:
            await self._changing(f"return of {', '.join(kept.released)}", self._bring_back(kept.released), released=())
        await self._continue()
        self._kept.write(paused=False)
        return Phase("kv", begun, self._clock.now(), "the rest of its memory is back; scheduling resumed")

    async def prove(self) -> tuple[Proof, Phase]:
        begun = self._clock.now()
        known = self._kept.now.contents.get(self._revision)
        if known is None:
            raise ProofFailed("there is no canary for this content: this engine never held it before")
        want = known.canary
        tokens, logprobs = await self._generate(want.prompt_token_ids, len(want.token_ids), apart=False)
        canary.finite(logprobs)
        proof = canary.hold(want, tokens, logprobs, self._context.assignment.spec.proof.tolerance_nats)
        said = f"{proof.tokens} tokens, off by at most {proof.largest_difference:.2g} nats"
        return proof, Phase("canary", begun, self._clock.now(), said)

    # ------------------------------------------------------------------ looks

    async def health(self) -> Health:
        running, waiting, mark = await self._load()
        now = self._clock.monotonic()
        seen, since = self._progressed
        if mark != seen:
            self._progressed = (mark, now)
        elif now - since > STALL_SECONDS:
            return Health(False, f"nothing moved in it for {now - since:.0f} s", running, waiting)
        if not await self._ready():
            return Health(False, f"{self.engine} says that it takes no requests", running, waiting)
        return Health(True, "", running, waiting)

    async def resident(self) -> tuple[int, int, int]:
        _, weights, cache = await self._describe()
        released = self._kept.now.released
        return (0 if WEIGHTS in released else weights), (0 if "kv_cache" in released else cache), 0

    @abstractmethod
    async def close(self) -> None: ...

    @property
    def _revision(self) -> str:
        assignment = self._context.assignment
        return assignment.content_revision or assignment.spec.revision


def _name(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(digests), sort_keys=True).encode()).hexdigest()[:32]
