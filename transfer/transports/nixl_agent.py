"""NIXL's agent, used so that none of its traps is met: registered memory, peers, reads.

Optional: wheel nixl-cu12 or nixl-cu13, imported when an agent is first opened. What was found with 1.5.1:

- Its UCX loads libefa of the system, whose libraries clash with the wheel's own when the process ends (SIGSEGV):
  UCX_MODULES=^efa before the import keeps it out, unless somebody has set UCX_MODULES (on EFA, say). A process that had
  an agent still leaves best by os._exit after its own clean-up.
- Its parameter ucx_devices pins no card: UCX_NET_DEVICES does, read when the backend is made.
- Over tcp UCX lets whoever reaches its port read any address, registered or not: there are no keys as RDMA has them.
  And it may abort a source that was stopped in mid-read, and whose reader is gone. TRANSPORTS leaves tcp out.
- What was posted cannot be taken back: with the handle released and the peer removed, the bytes still land. Only an
  agent that is destroyed writes nothing more, so one with a read that does not end is given up.
- deserialize_descs unpickles, so descriptors of peers are plain numbers here. Metadata of a peer is parsed by NIXL, in
  C++: it is bounded, and taken only over a connection that a grant opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, TypeVar

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.extents import Extents
from relight.transfer.segment import HOST

T = TypeVar("T")

WHEELS = ("nixl_cu12", "nixl_cu13")
"""By the major version of CUDA they were built for. The meta package `nixl` installs both."""
TRANSPORTS = "ib,cuda,self"
"""UCX_TLS: what has keys of its own, and what stays inside one process or device."""
METADATA_BYTES = 1 << 20
"""Most that an agent's metadata may take; a card's is some hundred bytes, and some dozen for each registration."""
NAME = "relight-"
DONE, UNDER_WAY = "DONE", "PROC"
_environment = threading.Lock()


def installed() -> bool:
    """Whether a wheel of NIXL is there; importing it may still fail."""
    return any(importlib.util.find_spec(name) is not None for name in WHEELS)


@cache
def _api() -> Any:
    """NIXL's Python interface. Raises LocalFault saying what to install."""
    os.environ.setdefault("UCX_MODULES", "^efa")
    why = []
    for name in WHEELS:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError as error:
            why.append(f"{name}: {error}")
    raise LocalFault(f"NIXL needs the wheel nixl-cu12 or nixl-cu13: {'; '.join(why)}")


@contextmanager
def _set(**values: str) -> Iterator[None]:
    """UCX reads its settings from the environment alone; others in this process keep theirs."""
    with _environment:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _attempt(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:
        # NIXL raises errors of its own, all derived from Exception alone.
        raise LocalFault(f"{what}: {type(error).__name__} {error}") from error


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory of an agent: where its pieces lie, and on which device (HOST: none)."""

    agent: str
    pieces: Extents
    device: int

    def plain(self) -> dict[str, object]:
        return {"agent": self.agent, "pieces": self.pieces.told(), "device": self.device}

    @classmethod
    def parse(cls, raw: object) -> Region:
        """Raises InvalidInput saying what was expected."""
        if not isinstance(raw, dict) or set(raw) != set(cls.__dataclass_fields__):
            raise InvalidInput(f"expected a NIXL region with {', '.join(cls.__dataclass_fields__)}")
        agent = raw["agent"]
        if not isinstance(agent, str) or len(agent) > 64 or not agent.startswith(NAME) or not agent.isascii():
            raise InvalidInput(f"expected agent of a NIXL region as {NAME} and at most 64 characters")
        device = raw["device"]
        if type(device) is not int or not HOST <= device < 1 << 16:
            raise InvalidInput(f"expected device of a NIXL region from {HOST} to {(1 << 16) - 1}")
        return cls(agent, Extents.parse(raw["pieces"]), device)


@dataclass(slots=True)
class _Peer:
    """A source's metadata, known to the agent for as long as somebody reads it."""

    metadata: bytes
    users: int = 0


def _kind(device: int) -> str:
    return "DRAM" if device == HOST else "VRAM"


class Agent:
    """The agent of one device, on one card: opened when first used, opened anew after it was given up. Thread-safe.

    A source's agent is not a receiver's: giving up the one must not end the other.
    """

    def __init__(self, card: str, transports: str = TRANSPORTS) -> None:
        """`card` as UCX names it ("mlx5_0:1", an interface for tcp); `transports` is UCX_TLS."""
        self.card, self._transports = card, transports
        self._lock = threading.Lock()
        self._nixl: Any = None
        self._numbers = count()
        self._memory: dict[int, Any] = {}
        self._peers: dict[str, _Peer] = {}
        self._met: dict[int, str] = {}
        self._reads: dict[int, Any] = {}

    def _opened(self) -> Any:
        if self._nixl is None:
            api = _api()
            name = f"{NAME}{secrets.token_hex(16)}"
            wanted = api.nixl_agent_config(backends=["UCX"])
            with _set(UCX_NET_DEVICES=self.card, UCX_TLS=self._transports):
                self._nixl = _attempt(f"a NIXL agent on {self.card}", lambda: api.nixl_agent(name, wanted))
        return self._nixl

    def register(self, pieces: Extents, device: int) -> tuple[int, Region]:
        """Registers memory; its number is what `deregister` takes. Raises LocalFault."""
        with self._lock:
            nixl = self._opened()
            what = f"registering {pieces.bytes} bytes on {self.card} (memlock limit?)"
            listed = [(piece.address, piece.bytes, max(device, 0), "") for piece in pieces]
            described = _attempt(what, lambda: nixl.get_reg_descs(listed, _kind(device)))
            _attempt(what, lambda: nixl.register_memory(described))
            number = next(self._numbers)
            self._memory[number] = described
            return number, Region(nixl.name, pieces, device)

    def deregister(self, number: int) -> None:
        """Ends a registration, and with it its keys; of an agent that was given up it has ended already."""
        with self._lock:
            described = self._memory.pop(number, None)
            if described is not None:
                with suppress(Exception):
                    self._nixl.deregister_memory(described)

    def metadata(self) -> bytes:
        """What a reader's agent needs to reach this one and what is registered with it now. Raises LocalFault."""
        with self._lock:
            nixl = self._opened()
            return bytes(_attempt("NIXL's metadata", nixl.get_agent_metadata))

    def meet(self, name: str, metadata: bytes) -> int:
        """Makes the agent `name` known by its metadata; its number is what `read` and `part` take. Raises InvalidInput
        about the metadata, and LocalFault."""
        with self._lock:
            nixl = self._opened()
            peer = self._peers.get(name)
            if peer is None:
                self._load(nixl, name, metadata)
                peer = self._peers[name] = _Peer(metadata)
            elif peer.metadata != metadata:
                # Readers of an earlier registration are about to go.
                raise InvalidInput("its metadata differs from what is in use")
            peer.users += 1
            number = next(self._numbers)
            self._met[number] = name
            return number

    def _load(self, nixl: Any, name: str, metadata: bytes) -> None:
        # Names are random: who sends another's wants to stand in its place.
        if any(other.encode() in metadata for other in self._peers):
            raise InvalidInput("its metadata is another agent's")
        try:
            found = nixl.add_remote_agent(metadata)
        except Exception as error:
            raise InvalidInput(f"NIXL does not take its metadata: {error}") from error
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            nixl.remove_remote_agent(found)
            raise InvalidInput("its metadata is another agent's")

    def part(self, met: int) -> None:
        """The peer is not read any more by one who met it."""
        with self._lock:
            name = self._met.pop(met, "")
            if (peer := self._peers.get(name)) is not None:
                peer.users -= 1
                if not peer.users:
                    del self._peers[name]
                    with suppress(Exception):
                        self._nixl.remove_remote_agent(name)

    def read(self, met: int, into: tuple[int, int], region: Region, offset: int, length: int) -> int:
        """Starts reading `length` bytes at `offset` of a peer's region to the registered (address, device) `into`.

        Raises LocalFault.
        """
        with self._lock:
            if met not in self._met:
                raise LocalFault(f"the agent on {self.card} was given up")
            nixl, (address, device) = self._nixl, into
            here = [(address, length, max(device, 0))]
            there = [(region.pieces.at(offset, offset + length), length, max(region.device, 0))]

            def post() -> Any:
                handle = nixl.initialize_xfer(
                    "READ", nixl.get_xfer_descs(here, _kind(device)), nixl.get_xfer_descs(there, _kind(region.device)),
                    self._met[met],
                )  # fmt: skip
                if (state := nixl.transfer(handle)) not in (DONE, UNDER_WAY):
                    raise LocalFault(f"NIXL said {state}")
                return handle

            number = next(self._numbers)
            self._reads[number] = _attempt(f"posting a read on {self.card}", post)
            return number

    def state(self, number: int) -> str:
        """DONE, UNDER_WAY, or why the read failed. A read that is not under way is forgotten."""
        with self._lock:
            handle = self._reads.get(number)
            if handle is None:
                return f"the agent on {self.card} was given up"
            try:
                said = str(self._nixl.check_xfer_state(handle))
            except Exception as error:  # noqa: BLE001 - NIXL's own errors derive from Exception alone
                said = f"{type(error).__name__} {error}"
            if said != UNDER_WAY:
                del self._reads[number]
                with suppress(Exception):
                    self._nixl.release_xfer_handle(handle)
            return said

    def close(self) -> None:
        """Destroys the agent: from here on it writes nothing, whatever was under way. It opens anew when next used."""
        with self._lock:
            for handle in self._reads.values():
                with suppress(Exception):
                    self._nixl.release_xfer_handle(handle)
            self._reads.clear()
            for described in self._memory.values():
                with suppress(Exception):
                    self._nixl.deregister_memory(described)
            self._memory.clear()
            self._peers.clear()
            self._met.clear()
            self._nixl = None
