"""The seam between the agent and an engine: what any engine must be able to do, whatever it is.

An `EngineDriver` knows one kind of engine; it makes an `EngineHandle` for each member of an instance, new or
adopted. A handle never keeps state of its own about awake or asleep: the agent's transitions do, and the
engine itself refuses what is unsafe (a wake without a refill, for example).

Order within a start:  driver.command -> driver.compile_start -> (forked or spawned) -> handle.wait_empty
                       -> for each rung: handle.refill -> handle.wait_ready -> handle.describe
                       -> handle.prove_or_record -> handle.warm_up
                       -> handle.open_source | handle.sleep
                       -> handle.complete until nothing is left
Order within a wake:   for each rung: handle.refill -> handle.resume -> handle.prove -> handle.open_source
Order within a sleep:  handle.wait_idle -> handle.close_source -> handle.sleep -> measure -> handle.open_relay
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relight.agent.cache.key import EngineStart
from relight.core.fingerprint import Fingerprint
from relight.core.records import Endpoint, InstanceAssignment, OnTimeout, Phase, Rung, Shapes, SourceOffer
from relight.core.tls import TlsFiles
from relight.transfer.verify import Digest

COMPILE = "compile"
"""The directory of compile caches, inside an instance's own."""
Progress = Callable[[str], None]
"""Takes one line for people about what a long step is doing."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine's process: `env` is complete (nothing is inherited), `cwd` is private to it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    model_files: Mapping[str, str] = field(default_factory=dict)
    """Digests of the model's files that decide what is compiled, found on the way; by name."""


ROOM = 8192
"""Bytes that a zygote's command line and environment leave for those of its children to be shown in."""


@dataclass(frozen=True, slots=True)
class ZygoteCommand:
    """How to start a zygote (plugin/zygote), and the socket that it forks on once it is ready."""

    command: EngineCommand
    socket: Path


@dataclass(frozen=True, slots=True)
class MemberContext:
    """Where one member of an instance lives: its private directory, devices, and the address to bind."""

    assignment: InstanceAssignment
    directory: Path
    """Private to this instance (mode 0700); holds its sockets, logs, caches. Kept over agent restarts."""
    log_path: Path
    """Where the engine's output goes."""
    bind_host: str
    """Address that engine and data sockets listen on."""
    force_tcp: bool = False
    data_tls: TlsFiles | None = None
    """What weights travel between hosts under; None: in the clear."""
    source_rate: int | None = None
    """Bytes per second that receivers together may read from the member; None: no bound."""
    cards: tuple[str, ...] = ()
    """RDMA cards that the member reads and is read by, each as `name@address`."""
    digests: Digest = Digest.XXH3
    """What proves the bytes of weights."""

    @property
    def compile_root(self) -> Path:
        """Where this start's engine compiles: private to it, and gone with it."""
        return self.directory / COMPILE


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a started engine says of itself."""

    fingerprint: Fingerprint
    endpoint: Endpoint
    weight_bytes: int
    kv_bytes: int
    """Bytes of KV cache resident now (not reserved address space)."""
    phases: tuple[Phase, ...] = ()
    """Where the engine's own start time went, on its own clock."""
    direct: Mapping[str, str] = field(default_factory=dict)
    """By RDMA card: how it reaches the device's memory, tried at the start; behind `no: `, why it does not."""


@dataclass(frozen=True, slots=True)
class Refill:
    """A refill that arrived and whose every tensor equals the source's manifest; `brought` by whom, in bytes."""

    bytes: int
    phases: tuple[Phase, ...]
    detail: str
    brought: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proof:
    """A canary that agreed with the source's own: token ids equal, log-probabilities within tolerance."""

    tokens: int
    largest_difference: float
    """In nats, over all compared log-probabilities."""


@dataclass(frozen=True, slots=True)
class Health:
    """Liveness from engine progress: `alive` False carries the reason."""

    alive: bool
    reason: str = ""
    requests_running: int = 0
    requests_waiting: int = 0
    details: Mapping[str, str] = field(default_factory=dict)


class ProofFailed(Exception):
    """The canary differs from the source's: the wake failed, and the reason says where they part."""


class EngineHandle(Protocol):
    """One member of one instance: a started (or adopted) engine. Every call has a deadline of its own."""

    def follow(self, assignment: InstanceAssignment) -> None:
        """Acts for `assignment` from now on: of the same process, and of other content where that has changed."""
        ...

    async def wait_empty(self, deadline_seconds: float, progress: Progress) -> bool:
        """Whether the engine that is starting waits for its weights now; False when it loads them itself, or has them.

        Raises LocalFault at the deadline.
        """
        ...

    async def prove_or_record(self) -> tuple[Proof | None, Phase]:
        """After a start: proves the engine by its source's canary, or records one where the weights came without.

        The phase is named `canary`. Raises ProofFailed, LocalFault.
        """
        ...

    async def warm_up(self, prompt_tokens: int) -> None:
        """Answers one request of Relight's own with a prompt of so many tokens, or the most the engine takes. It is no
        traffic, and no later request finds anything of it in the engine's caches. Raises LocalFault."""
        ...

    async def shapes(self) -> Shapes:
        """What ran since the engine's process began, as plain counts. Raises LocalFault."""
        ...

    async def complete(self) -> int:
        """Does the next piece of what a lazy start left out; returns how many are left. Raises LocalFault."""
        ...

    async def wait_ready(self, deadline_seconds: float, progress: Progress) -> None:
        """Returns when the engine answers its health check. Raises LocalFault at the deadline or when it died."""
        ...

    async def describe(self) -> EngineFacts:
        """Fingerprint, endpoint and sizes. Raises LocalFault."""
        ...

    async def open_source(self) -> SourceOffer:
        """Lets readers with a valid grant read the weights, under a new generation."""
        ...

    async def open_relay(self) -> SourceOffer | None:
        """Says where a sleeper will be read while it is filled, by others that are filled at the same time; None for an
        engine that passes nothing on. Raises LocalFault."""
        ...

    async def close_source(self, deadline_seconds: float) -> None:
        """Refuses new readers and drains those that read; cuts them at the deadline. So it does with a relay's."""
        ...

    async def wait_idle(self, deadline_seconds: float, on_timeout: OnTimeout) -> None:
        """Returns when no request runs or waits; at the deadline aborts them, or raises LocalFault for `wait`."""
        ...

    async def sleep(self, level: int) -> None:
        """Releases weights and KV cache (level 1 keeps a host copy of the weights). Raises LocalFault."""
        ...

    async def refill(
        self, rung: Rung, content_revision: str, progress: Progress, *, checkpoint: Path | None = None,
        share: bool = False,
    ) -> Refill:  # fmt: skip
        """Brings pages and verified weights back by one rung; nothing answers yet. A rung without a source reads
        `checkpoint`, a directory, or the model's own; a copy on this host may be mapped where it shall `share` pages.

        Raises RemoteFault (blame the source), LocalFault (do not), ModelDirty (bytes were overwritten: every
        further rung overwrites all of them, so the ladder may go on, but nothing may be served in between).
        """
        ...

    async def resume(self) -> Phase:
        """Restores the KV cache and scheduling; the returned phase is named `kv`. Raises LocalFault."""
        ...

    async def prove(self) -> tuple[Proof, Phase]:
        """Runs the canary through the engine's own socket; the phase is named `canary`. Raises ProofFailed."""
        ...

    async def suspend(self) -> None:
        """After a failed wake: pauses scheduling and gives the memory back, so that the device is free."""
        ...

    async def health(self) -> Health:
        """Liveness from progress, not from an open port."""
        ...

    async def resident(self) -> tuple[int, int, int]:
        """(weight bytes resident, KV bytes resident, bytes of owned segments that no process maps)."""
        ...

    async def close(self) -> None:
        """Drops this handle's own connections; the engine runs on."""
        ...


class EngineDriver(Protocol):
    """One kind of engine on this slot."""

    name: str
    no_zygote: str
    """Why engines of this kind are never forked, in words; empty where they can be."""

    async def version(self) -> str | None:
        """The installed engine's version, or None with nothing installed where engines run."""
        ...

    def zygote(self, directory: Path) -> ZygoteCommand | None:
        """How to start the process that this engine's members are forked from, living in `directory`; None: there is
        none, with nothing gained by one."""
        ...

    async def command(self, context: MemberContext) -> EngineCommand:
        """How to start this member. Raises InvalidInput for arguments that Relight must own itself, or a model that is
        not where engines run; Unavailable when that cannot be asked."""
        ...

    async def compile_start(self, context: MemberContext, command: EngineCommand) -> EngineStart | None:
        """All that decides what this start compiles; None for an engine without compile caches. Raises InvalidInput,
        Unavailable."""
        ...

    def handle(self, context: MemberContext) -> EngineHandle:
        """A handle on the member's engine, whether it was just spawned or is adopted after a restart."""
        ...
