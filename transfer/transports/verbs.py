"""RDMA verbs by the distribution's pyverbs: devices, registered memory, reliable connections, reads.

pyverbs must match the system's libibverbs, so it comes from the distribution (package python3-pyverbs) and never from
PyPI. That one package is exposed, from where the distribution keeps it; it is imported when a device is first opened.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from relight.core.errors import InvalidInput, LocalFault
from relight.transfer.transports.flight import DEPTH

T = TypeVar("T")

DISTRIBUTION = Path("/usr/lib/python3/dist-packages")
PORT = 1
RETRIES = 6
"""For a peer that is lost, and for one that is not ready. One more would mean for ever: for the latter by the
specification, for the former with soft-RoCE."""
LOST_SECONDS = 2.0
"""About how long a peer may be silent in all before a connection breaks."""
_TIMEOUT_UNIT = 4.096e-6
"""Seconds of time-out exponent 0 (InfiniBand specification, "local ACK timeout")."""


@cache
def _module(name: str) -> ModuleType:
    """The module `pyverbs.<name>` of the distribution. Raises LocalFault saying what to install."""
    if "pyverbs" not in sys.modules:
        home = DISTRIBUTION / "pyverbs"
        spec = importlib.util.spec_from_file_location(
            "pyverbs", home / "__init__.py", submodule_search_locations=[str(home)]
        )
        if spec is None or spec.loader is None or not home.is_dir():
            raise LocalFault(f"RDMA needs pyverbs in {DISTRIBUTION}: install the package python3-pyverbs")
        sys.modules["pyverbs"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise LocalFault(f"the distribution's pyverbs cannot be used by this Python: {error}") from error


def _constant(name: str) -> int:
    """A verbs constant: old versions of pyverbs keep them flat, newer ones in classes."""
    enums = _module("enums")
    if (found := getattr(enums, name, None)) is not None:
        return int(found)
    for kind in vars(enums).values():
        if (found := getattr(kind, name, None)) is not None:
            return int(found)
    raise LocalFault(f"the distribution's pyverbs does not know {name}")


def _constants(*names: str) -> int:
    total = 0
    for name in names:
        total |= _constant(name)
    return total


def _attempt(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except LocalFault:
        raise
    except Exception as error:
        # pyverbs raises errors of its own, all derived from Exception alone.
        raise LocalFault(f"{what}: {error}") from error


ROUTABLE = "RoCE v2"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses; `kind` as the kernel names it ("RoCE v2", "IB/RoCE v1")."""

    index: int
    address: str
    kind: str


def choose_gid(table: Iterable[Gid]) -> Gid:
    """The address to be reached at: RoCE v2 over IPv4 (routable), else any RoCE v2, else the first. Raises
    LocalFault."""
    best: Gid | None = None
    for gid in table:
        if not set(gid.address) - set("0:"):
            continue
        if gid.kind == ROUTABLE and "0000:ffff:" in gid.address:
            return gid
        if best is None or (gid.kind == ROUTABLE and best.kind != ROUTABLE):
            best = gid
    if best is None:
        raise LocalFault("the port has no address (GID): is the interface up, and has it an IP address?")
    return best


def gid_table(device: str, sysfs: Path = Path("/sys")) -> Iterator[Gid]:
    """The addresses of a device's first port, as sysfs shows them. Read one by one: some tables have a thousand."""
    port = sysfs / "class/infiniband" / device / "ports" / str(PORT)
    for index in count():
        try:
            address = (port / "gids" / str(index)).read_text().strip()
        except OSError:
            return
        # An unused entry has no type: reading it fails with EINVAL.
        with suppress(OSError):
            yield Gid(index, address, (port / "gid_attrs/types" / str(index)).read_text().strip())


def timeout_exponent(lost_seconds: float) -> int:
    """The exponent whose time-out, RETRIES + 1 times, is at least about `lost_seconds`; 1 to 31."""
    exponent = 1
    while _TIMEOUT_UNIT * 2**exponent * (RETRIES + 1) < lost_seconds and exponent < 31:
        exponent += 1
    return exponent


def _within(raw: Mapping[str, object], what: str, **limits: int) -> None:
    for name, limit in limits.items():
        value = raw[name]
        if type(value) is not int or not 0 <= value < limit:
            raise InvalidInput(f"expected {name} of {what} from 0 to {limit - 1}")


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a reliable connection, as the other end needs to know it."""

    qp: int
    psn: int
    gid: str
    lid: int
    mtu: int

    def plain(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def parse(cls, raw: object) -> Peer:
        """Raises InvalidInput saying what was expected."""
        if not isinstance(raw, dict) or set(raw) != set(cls.__dataclass_fields__):
            raise InvalidInput(f"expected an RDMA end with {', '.join(cls.__dataclass_fields__)}")
        _within(raw, "an RDMA end", qp=1 << 24, psn=1 << 24, lid=1 << 16, mtu=6)
        try:
            # Of the form of an IPv6 address, whatever it stands for.
            gid = ipaddress.IPv6Address(raw["gid"] if isinstance(raw["gid"], str) else "").exploded
        except ValueError:
            raise InvalidInput("expected gid of an RDMA end as hexadecimal groups") from None
        return cls(raw["qp"], raw["psn"], gid, raw["lid"], raw["mtu"])


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory at the other end: where it begins, how long it is, and the key that opens it.

    `at` is the offset of the source's segment at which it lies.
    """

    address: int
    bytes: int
    rkey: int
    at: int = 0

    def plain(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def parse(cls, raw: object) -> Region:
        """Raises InvalidInput saying what was expected."""
        if not isinstance(raw, dict) or set(raw) != set(cls.__dataclass_fields__):
            raise InvalidInput(f"expected an RDMA region with {', '.join(cls.__dataclass_fields__)}")
        _within(raw, "an RDMA region", address=1 << 64, bytes=1 << 64, rkey=1 << 32, at=1 << 64)
        return cls(**raw)


class Memory:
    """Memory of this process, registered with one card; deregister it before its pages are given back."""

    def __init__(self, region: Any, address: int, length: int, known_at: int | None = None) -> None:
        """`known_at` is where the card has it, when that is not its address."""
        self._region, self.address, self.bytes = region, address, length
        self._known_at = address if known_at is None else known_at

    @property
    def lkey(self) -> int:
        return int(self._region.lkey)

    @property
    def region(self) -> Region:
        """What a reader needs of it."""
        return Region(self._known_at, self.bytes, int(self._region.rkey))

    def known(self, address: int) -> int:
        """What the card calls an address of it."""
        return self._known_at + address - self.address

    def close(self) -> None:
        """Deregisters: nobody reads it from here on, and its pages are no longer pinned."""
        self._region.close()


class Device:
    """One opened network card."""

    def __init__(self, name: str, lost_seconds: float = LOST_SECONDS) -> None:
        """Raises LocalFault naming the card and what is wrong with it."""
        self.name, self._lost_seconds = name, lost_seconds
        self._gid = choose_gid(gid_table(name))
        self._context = _attempt(f"opening {name}", lambda: _module("device").Context(name=name))
        port = _attempt(f"asking the port of {name}", lambda: self._context.query_port(PORT))
        self.mtu, self.lid = int(port.active_mtu), int(port.lid)
        self._pd = _attempt(f"a protection domain on {name}", lambda: _module("pd").PD(self._context))

    def register(self, address: int, length: int, *, writable: bool) -> Memory:
        """Registers [address, address + length), to be read by whoever gets its key; `writable` by this device's own
        reads, too. Raises LocalFault.

        Memory of an accelerator takes a module of its driver's in the kernel (nvidia_peermem).
        """
        access = self._access(writable=writable)
        made = _attempt(
            f"registering {length} bytes with {self.name} (memlock limit?)",
            lambda: _module("mr").MR(self._pd, length, access, address=address),
        )
        return Memory(made, address, length)

    def register_dma_buf(self, address: int, length: int, descriptor: int, *, writable: bool) -> Memory:
        """The same for an accelerator's memory, by a DMA buffer of it, which stays the caller's. Raises LocalFault."""
        access = self._access(writable=writable)
        made = _attempt(
            f"registering a DMA buffer of {length} bytes with {self.name}",
            lambda: _module("mr").DmaBufMR(self._pd, length, access, dmabuf=descriptor, offset=0),
        )
        # pyverbs lets a card know such memory by its place in the buffer.
        return Memory(made, address, length, known_at=0)

    @staticmethod
    def _access(*, writable: bool) -> int:
        return _constant("IBV_ACCESS_REMOTE_READ") | (_constant("IBV_ACCESS_LOCAL_WRITE") if writable else 0)

    def connection(self) -> Connection:
        """A new reliable connection, not connected. Raises LocalFault."""
        return Connection(self, self._context, self._pd, self._gid, self._lost_seconds)

    def close(self) -> None:
        self._pd.close()
        self._context.close()


class Connection:
    """One reliable connection (RC): this end reads, or lets itself be read."""

    def __init__(self, device: Device, context: Any, pd: Any, gid: Gid, lost_seconds: float) -> None:
        self.device, self._gid, self._lost_seconds = device, gid, lost_seconds
        self._psn = random.getrandbits(24)
        qp = _module("qp")
        self._cq = _attempt("a completion queue", lambda: _module("cq").CQ(context, 2 * DEPTH, None, None, 0))
        capacity = qp.QPCap(max_send_wr=2 * DEPTH, max_recv_wr=1)
        wanted = qp.QPInitAttr(qp_type=_constant("IBV_QPT_RC"), scq=self._cq, rcq=self._cq, cap=capacity)
        self._qp = _attempt(f"a queue pair on {device.name}", lambda: qp.QP(pd, wanted))
        attributes = qp.QPAttr(qp_state=_constant("IBV_QPS_INIT"), port_num=PORT)
        attributes.qp_access_flags = _constant("IBV_ACCESS_REMOTE_READ")
        self._modify(attributes, "STATE", "PKEY_INDEX", "PORT", "ACCESS_FLAGS")

    def _modify(self, attributes: Any, *mask: str) -> None:
        bits = _constants(*(f"IBV_QP_{m}" for m in mask))
        _attempt(f"bringing up a connection on {self.device.name}", lambda: self._qp.modify(attributes, bits))

    @property
    def peer(self) -> Peer:
        """This end, for the other one."""
        return Peer(int(self._qp.qp_num), self._psn, self._gid.address, self.device.lid, self.device.mtu)

    def connect(self, other: Peer) -> None:
        """Ready to read and to be read. Raises LocalFault."""
        addr, qp = _module("addr"), _module("qp")
        route = addr.GlobalRoute(dgid=addr.GID(other.gid), sgid_index=self._gid.index, hop_limit=64)
        attributes = qp.QPAttr(qp_state=_constant("IBV_QPS_RTR"))
        attributes.path_mtu = min(self.device.mtu, other.mtu)
        attributes.dest_qp_num, attributes.rq_psn = other.qp, other.psn
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = DEPTH, 12
        attributes.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=PORT, dlid=other.lid)
        self._modify(attributes, "STATE", "AV", "PATH_MTU", "DEST_QPN", "RQ_PSN", "MAX_DEST_RD_ATOMIC", "MIN_RNR_TIMER")
        attributes = qp.QPAttr(qp_state=_constant("IBV_QPS_RTS"))
        attributes.timeout, attributes.retry_cnt = timeout_exponent(self._lost_seconds), RETRIES
        attributes.rnr_retry, attributes.sq_psn, attributes.max_rd_atomic = RETRIES, self._psn, DEPTH
        self._modify(attributes, "STATE", "TIMEOUT", "RETRY_CNT", "RNR_RETRY", "SQ_PSN", "MAX_QP_RD_ATOMIC")

    def read(self, memory: Memory, into: int, region: Region, offset: int, length: int) -> None:
        """Posts a read of `length` bytes at `offset` of the region, into address `into` of registered `memory`."""
        wr = _module("wr")
        request = wr.SendWR(
            wr_id=length, opcode=_constant("IBV_WR_RDMA_READ"), num_sge=1,
            sg=[wr.SGE(memory.known(into), length, memory.lkey)], send_flags=_constant("IBV_SEND_SIGNALED"),
        )  # fmt: skip
        request.set_wr_rdma(region.rkey, region.address + offset)
        _attempt(f"posting a read on {self.device.name}", lambda: self._qp.post_send(request))

    def completed(self) -> tuple[int, int, str]:
        """(reads, their bytes, "" or why the next one failed) since the last call; they complete in order."""
        _, found = self._cq.poll(2 * DEPTH)
        reads = done = 0
        for one in found:
            if one.status != _constant("IBV_WC_SUCCESS"):
                return reads, done, _status(one.status)
            reads, done = reads + 1, done + int(one.wr_id)
        return reads, done, ""

    def close(self) -> None:
        self._qp.close()
        self._cq.close()


_STATUS = {
    "LOC_PROT_ERR": "the local memory is not registered for it",
    "WR_FLUSH_ERR": "the connection broke",
    "REM_ACCESS_ERR": "the key does not open that memory",
    "REM_INV_REQ_ERR": "the peer does not accept such a read",
    "REM_OP_ERR": "the peer could not serve it",
    "RETRY_EXC_ERR": "the peer does not answer any more (link down?)",
    "RNR_RETRY_EXC_ERR": "the peer is not ready",
}


def _status(status: int) -> str:
    for name, meaning in _STATUS.items():
        if status == _constant(f"IBV_WC_{name}"):
            return f"{meaning} ({name.lower()})"
    return f"verbs status {status}"
