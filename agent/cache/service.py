"""An agent's part of the ring: its own node, what the controller says of the others, and the way of its starts to both.

    opened -> [signer and store on disk, node listening] -> report -> controller -> hear -> members, trust, grants
    hear, and every `repair_seconds` -> repair (a thread of its own)

The last ring heard lies beside the bundles, in a file of its owner alone: so a restarted agent knows whose bundles it
may show, and `python -m relight.agent.cache` reaches the ring from outside.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from relight.agent.cache.node import CacheNode
from relight.agent.cache.placement import Membership
from relight.agent.cache.ring import Ring
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.start import CompileCache
from relight.agent.cache.store import Store
from relight.core.clock import Clock
from relight.core.errors import InvalidInput
from relight.core.logs import get_logger
from relight.core.records import CacheReport, CacheRing, StartCache
from relight.core.tls import TlsFiles
from relight.protos.convert import from_dict
from relight.transfer.grants import new_key

_log = get_logger("agent.cache.service")
SETTLE = 1.0
"""Seconds, at most, between a change of the members and the repair that follows: nodes begin it apart."""
RING_FILE, SIGNER_FILE = "ring.json", "signer.pem"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The agent's section `compile_cache`, with all paths and addresses decided."""

    directory: Path
    quota_bytes: int
    host: str
    port: int = 0
    trusted_keys: tuple[str, ...] = ()
    archive: Path | None = None
    wait_seconds: float = 600.0
    repair_seconds: float = 600.0


def heard_before(directory: Path) -> CacheRing | None:
    """The ring that an agent with this directory heard of last; None when there is none that can be read."""
    try:
        return from_dict(json.loads((directory / RING_FILE).read_bytes()), CacheRing, "ring")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, InvalidInput) as error:
        _log.warning("cache.ring-file", reason=str(error))
        return None


def reachable(
    heard: CacheRing, own: Iterable[str], clock: Clock, holder: str, tls: TlsFiles | None = None
) -> tuple[Ring, Trust]:
    """The ring of `heard`, as one who holds its grants; `own` are keys that are trusted besides."""
    trust = trusting(own, heard.signers)
    grants = {n.slot: n.grant for n in heard.nodes}
    return Ring(members_of(heard), lambda node: grants.get(node, ""), trust, clock, holder=holder, tls=tls), trust


def members_of(heard: CacheRing) -> Membership:
    return Membership(heard.revision, {n.slot: n.address for n in heard.nodes}, heard.replicas)


def trusting(own: Iterable[str], signers: Iterable[str]) -> Trust:
    """Own keys, and the signers that the controller names as far as they are keys: one bad name costs only itself."""
    good = []
    for key in signers:
        try:
            Trust([key])
            good.append(key)
        except InvalidInput as error:
            _log.warning("cache.signer", reason=str(error))
    return Trust([*own, *good])


class CacheService:
    """Runs from construction until `close`. Safe for threads."""

    def __init__(
        self, slot: str, settings: CacheSettings, clock: Clock, changed: Callable[[], None], tls: TlsFiles | None = None
    ) -> None:
        """Opens the store and listens; `changed` is told, from any thread, when `report` would differ.

        Raises OSError, InvalidInput, LocalFault when that cannot be.
        """
        self.settings, self._clock, self._changed = settings, clock, changed
        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._signer = _signer(settings.directory / SIGNER_FILE)
        self._own = (self._signer.public, *settings.trusted_keys)
        self._grant_key = new_key()
        before = heard_before(settings.directory)
        trust = trusting(self._own, before.signers if before else ())
        self._store = Store(settings.directory, trust, clock, quota=settings.quota_bytes)
        self._archive = _archive(settings.archive, trust, clock)
        self._grants: Mapping[str, str] = {}
        # Nobody is a member until the controller of this day says so: addresses and grants of before may be stale.
        self.ring = Ring(Membership(0, {}), self._grant, trust, clock, holder=slot, tls=tls)
        self.cache = CompileCache(self.ring, self._signer, clock, archive=self._archive)
        self._numbers = {"hits": 0, "misses": 0, "compiles": 0}
        self._lock = threading.Lock()
        self._heard: CacheRing | None = None
        self._applied: CacheRing | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._node = CacheNode(
            slot, self._store, self._grant_key, clock, host=settings.host, port=settings.port, tls=tls
        )  # fmt: skip
        self._told = self.report()
        self._repairs = threading.Thread(target=self._keep, name="relight-cache-repair", daemon=True)
        self._repairs.start()

    def _grant(self, node: str) -> str:
        return self._grants.get(node, "")

    def report(self) -> CacheReport:
        """As it stands now; costs nothing that grows with what is held."""
        bundles, used, quarantined = self._store.used
        return CacheReport(
            self._node.address, self._signer.public, bundles, used, self.settings.quota_bytes, quarantined,
            grant_key=self._grant_key, **self._numbers,
        )  # fmt: skip

    def look(self) -> None:
        """Tells when the numbers are others than when it was last asked: peers put bundles here by themselves."""
        now = self.report()
        if now != self._told:
            self._told = now
            self._changed()

    def hear(self, heard: CacheRing) -> None:
        """The controller's word on members, grants and signers. Starts see it at once; disk and repair follow."""
        trust = trusting(self._own, heard.signers)
        self._grants = {n.slot: n.grant for n in heard.nodes}
        self.ring.members, self.ring.trust = members_of(heard), trust
        self._node.set_members(self.ring.members)
        self._heard = heard
        self._wake.set()

    def count(self, record: StartCache) -> None:
        """Takes one start into the numbers."""
        with self._lock:
            self._numbers["hits"] += record.hit
            self._numbers["misses"] += not record.hit
            self._numbers["compiles"] += record.compiled > 0
        self.look()

    # ------------------------------------------------------------------ repair

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self.settings.repair_seconds)
            # Those who hear of one change together do not ask each other at the same moment.
            if self._closing.wait(random.uniform(0, SETTLE)):  # noqa: S311 - spreads load, no secret
                return
            self._wake.clear()
            try:
                self._apply()
            except Exception:  # noqa: BLE001 - a defect in here must not end all repairs; it is logged as one
                _log.exception("cache.repair-failed")

    def _apply(self) -> None:
        heard, before = self._heard, self._applied
        if heard is None:
            return
        if before is None or heard.signers != before.signers:
            self._store.retrust(self.ring.trust)
            if self._archive is not None:
                self._archive.retrust(self.ring.trust)
        if heard != before:
            _write(self.settings.directory / RING_FILE, heard)
        self._applied = heard
        # New grants alone change nothing of who keeps what; and without a wake this is the periodic look.
        if before is None or heard.revision != before.revision or heard == before:
            done = self._node.repair(self._grant)
            if done.fetched or done.dropped or done.failed:
                _log.info(
                    "cache.repaired", fetched=done.fetched, dropped=done.dropped, bytes=done.bytes,
                    unheard=done.unheard, failed=done.failed,
                )  # fmt: skip
            self.look()

    def close(self) -> None:
        """Stops serving; bundles stay."""
        self._closing.set()
        self._wake.set()
        self.cache.close()
        self._node.close()


def _signer(path: Path) -> Signer:
    if not path.exists():
        Signer.new().save(path)
    return Signer.load(path)


def _archive(path: Path | None, trust: Trust, clock: Clock) -> Store | None:
    if path is None:
        return None
    try:
        return Store(path, trust, clock, quota=1 << 62)
    except OSError as error:
        _log.warning("cache.archive", directory=str(path), reason=str(error))
        return None


def _write(path: Path, heard: CacheRing) -> None:
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(asdict(heard), out)
    temporary.rename(path)
