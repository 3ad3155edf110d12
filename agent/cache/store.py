"""A node's disk: sealed bundles by name, within a quota, the least recently used collected first.

    <root>/bundles/<name>/{manifest,signature,body}   complete and proven; its manifest's mtime is the last use
    <root>/incoming/<random>/                          being received; emptied at start
    <root>/quarantine/<key digest>                     JSON: what failed to load, and why

A bundle appears by one rename, so a kill at any point leaves it whole or absent. The same layout is the archive that is
carried into clusters without a network (agent/cache/archive.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from relight.agent.cache import bundle
from relight.agent.cache.bundle import Limits, Manifest, Sealed
from relight.agent.cache.key import CacheKey
from relight.agent.cache.placement import Holding, admit
from relight.agent.cache.signing import Trust
from relight.core import failpoints
from relight.core.clock import Clock
from relight.core.errors import Conflict, Denied, InvalidInput, NotFound, RelightError, Unavailable
from relight.core.logs import get_logger

_log = get_logger("agent.cache.store")
MAX_REASON = 2000
MOST_QUARANTINES = 10_000


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A key whose bundle did engines harm: nobody gets it, nobody puts another until it is released."""

    key: str
    bundle: str
    reason: str
    since: float


class Store:
    """One directory of bundles. Safe for threads; not for two processes at once."""

    def __init__(self, root: Path, trust: Trust, clock: Clock, *, quota: int, limits: Limits | None = None) -> None:
        """Opens or creates the directory; what is damaged or no longer trusted in it is left out and named in the log.

        `quota` is in bytes of bodies. Raises OSError when the directory cannot be used.
        """
        self._root, self._clock, self._quota = root, clock, quota
        self.trust = trust
        self.limits = limits or Limits()
        self._lock = threading.RLock()
        self._held: dict[str, Holding] = {}
        self._keys: dict[str, CacheKey] = {}
        self._by_key: dict[str, str] = {}
        self._reserved: dict[Path, int] = {}
        self._quarantined: dict[str, Quarantine] = {}
        self._bytes = 0
        shutil.rmtree(root / "incoming", ignore_errors=True)
        for part in ("bundles", "incoming", "quarantine"):
            (root / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted((root / "bundles").iterdir()):
            self._open(path)
        for path in (root / "quarantine").iterdir():
            self._open_quarantine(path)

    def _open(self, path: Path) -> None:
        try:
            sealed = _read(path)
            manifest = bundle.verify(sealed, self.trust, self.limits)
            if sealed.name != path.name or (path / "body").stat().st_size != manifest.body_bytes:
                raise InvalidInput("its name or its body's length is not the manifest's")
            used = (path / "manifest").stat().st_mtime
        except (RelightError, OSError, ValueError) as error:
            _log.warning("cache.damaged", bundle=path.name, reason=str(error))
            return
        self._know(sealed.name, manifest, used)

    def _open_quarantine(self, path: Path) -> None:
        try:
            found = Quarantine(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            # The file's name is the key; without a reason it is a quarantine all the same.
            _log.warning("cache.quarantine-damaged", cache_key=path.name, reason=str(error))
            found = Quarantine(path.name, "", "the record of why was damaged", self._clock.now())
        self._quarantined[path.name] = found

    def _know(self, name: str, manifest: Manifest, used: float) -> None:
        key = manifest.key.digest
        self._bytes += manifest.body_bytes
        self._held[name] = Holding(key, name, manifest.body_bytes, used)
        self._keys[key] = manifest.key
        self._by_key[key] = name

    def _unknow(self, holding: Holding) -> None:
        self._bytes -= holding.bytes
        del self._by_key[holding.key]
        del self._keys[holding.key]

    def retrust(self, trust: Trust) -> None:
        """Other signers count from now on: what they sealed and was left out is taken in, what others did is left out.

        It stays on disk meanwhile: a list of signers that was too short for a moment costs nothing.
        """
        with self._lock:
            gone = self.trust.keys - trust.keys
            self.trust = trust
            unseen = [p for p in sorted((self._root / "bundles").iterdir()) if p.name not in self._held]
            for name in list(self._held) if gone else ():
                try:
                    bundle.verify(self.sealed(name), trust, self.limits)
                except (Denied, NotFound):
                    self._unknow(self._held.pop(name))
            for path in unseen:
                self._open(path)

    # ------------------------------------------------------------------ looking

    def find(self, key: str) -> Holding | None:
        """The bundle of a key (its digest), unless there is none or it is in quarantine."""
        with self._lock:
            name = self._by_key.get(key)
            return None if name is None or key in self._quarantined else self._held[name]

    def entries(self) -> list[Holding]:
        """Everything that is held and given out."""
        with self._lock:
            return [h for h in self._held.values() if h.key not in self._quarantined]

    def keys(self) -> list[CacheKey]:
        """The keys of what is held, readable."""
        with self._lock:
            return list(self._keys.values())

    @property
    def used(self) -> tuple[int, int, int]:
        """(bundles, bytes of them, keys in quarantine)."""
        with self._lock:
            return len(self._held), self._bytes, len(self._quarantined)

    def models(self) -> dict[str, str]:
        """The model of each held key, by the key's digest."""
        with self._lock:
            return {digest: key.fields.get("model", "") for digest, key in self._keys.items()}

    def sealed(self, name: str) -> Sealed:
        """The manifest and signature. Raises NotFound."""
        with self._lock:
            path = self._path(name)
        try:
            return _read(path)
        except (OSError, ValueError):
            raise NotFound(f"no bundle {name[:16]} here") from None

    def body(self, name: str) -> Path:
        """The file with the body. Raises NotFound."""
        with self._lock:
            return self._path(name) / "body"

    def open_body(self, name: str) -> BinaryIO:
        """The body, open: it can be read to its end whatever is collected meanwhile. Raises NotFound."""
        try:
            return self.body(name).open("rb")
        except OSError:
            raise NotFound(f"no bundle {name[:16]} here") from None

    def doubt(self, name: str) -> bool:
        """Proves a bundle's body anew, and gives it up when it is not what was signed. Whether it was good.

        A disk that rots shows at whoever reads: so readers say which bundle was bad, and repair brings a good one.
        """
        try:
            manifest = bundle.parse(self.sealed(name).manifest, self.limits)
            with self.open_body(name) as body:
                for number in range(len(manifest.chunks)):
                    bundle.prove(manifest, number, body.read(bundle.chunk_length(manifest.body_bytes, number)))
        except (Denied, OSError) as error:
            _log.warning("cache.rotten", bundle=name, reason=str(error))
            self.drop(name)
            return False
        return True

    def _path(self, name: str) -> Path:
        if name not in self._held or self._held[name].key in self._quarantined:
            raise NotFound(f"no bundle {name[:16]} here")
        return self._root / "bundles" / name

    def touch(self, name: str, used: float | None = None) -> None:
        """The bundle is used now, or was elsewhere at `used`."""
        with self._lock:
            if name not in self._held:
                return
            at = self._clock.now() if used is None else used
            self._held[name] = replace(self._held[name], last_use=at)
        try:
            os.utime(self._root / "bundles" / name / "manifest", (at, at))
        except FileNotFoundError:
            return

    # ------------------------------------------------------------------ changing

    def receive(self, sealed: Sealed, last_use: float | None = None) -> Incoming | None:
        """Room and a place for a bundle whose body comes next; None when it is held already.

        `last_use` is when it was last used elsewhere (a repair); now, by default. Raises Denied (who signed it),
        Conflict (another bundle of this key is held, or the key is in quarantine), InvalidInput (too large, not a
        bundle), Unavailable (no room).
        """
        manifest = bundle.verify(sealed, self.trust, self.limits)
        key, name = manifest.key.digest, sealed.name
        used = self._clock.now() if last_use is None else last_use
        with self._lock:
            if name in self._held and key not in self._quarantined:
                return None
            self._may_hold(key, name)
            taken = sum(self._reserved.values())
            room = admit(self._held.values(), manifest.body_bytes, self._quota - taken, used)
            if not room.taken:
                raise Unavailable(f"no room: {room.reason}", retry_after=60.0)
            for old in room.evicted:
                _log.info("cache.collected", bundle=old, last_use=self._held[old].last_use)
                self.drop(old)
            place = Path(tempfile.mkdtemp(dir=self._root / "incoming"))
            self._reserved[place] = manifest.body_bytes
        return Incoming(self, sealed, manifest, place, used)

    def _may_hold(self, key: str, name: str) -> None:
        if key in self._quarantined:
            raise Conflict(f"key {key} is in quarantine: {self._quarantined[key].reason}")
        other = self._by_key.get(key)
        if other is not None and other != name:
            raise Conflict(f"key {key} has a bundle already: {other[:16]}; bundles never change")

    def commit(self, incoming: Incoming) -> None:
        """Called by Incoming when its body is complete. Raises Conflict when the key got another bundle meanwhile."""
        key, name = incoming.manifest.key.digest, incoming.sealed.name
        with self._lock:
            self._may_hold(key, name)
            if name in self._held:
                return
            _write(incoming.place, incoming.sealed, incoming.last_use)
            failpoints.hit("cache.store.before-rename")
            target = self._root / "bundles" / name
            # What lies there and is not known was damaged: the proven one takes its place.
            shutil.rmtree(target, ignore_errors=True)
            incoming.place.rename(target)
            _sync_directory(target.parent)
            self._know(name, incoming.manifest, incoming.last_use)

    def forget(self, incoming: Incoming) -> None:
        """Called by Incoming at its end, either way."""
        with self._lock:
            self._reserved.pop(incoming.place, None)
        shutil.rmtree(incoming.place, ignore_errors=True)

    def drop(self, name: str) -> None:
        """Gives a bundle up."""
        with self._lock:
            holding = self._held.pop(name, None)
            if holding is None:
                return
            self._unknow(holding)
            # Out of sight first: a half-removed directory must not be found at the next start.
            grave = Path(tempfile.mkdtemp(dir=self._root / "incoming"))
            try:
                (self._root / "bundles" / name).rename(grave / name)
            except FileNotFoundError:
                _log.warning("cache.vanished", bundle=name)
        shutil.rmtree(grave, ignore_errors=True)

    # ------------------------------------------------------------------ quarantine

    def quarantined(self, key: str) -> Quarantine | None:
        """Why a key is given to nobody."""
        with self._lock:
            return self._quarantined.get(key)

    def quarantines(self) -> list[Quarantine]:
        """All of them."""
        with self._lock:
            return list(self._quarantined.values())

    def quarantine(self, record: Quarantine) -> None:
        """Takes a key out of service. Its bundle stays on disk for whoever looks into it, until it is collected.

        Raises Conflict when too many are.
        """
        with self._lock:
            if record.key in self._quarantined:
                return
            if len(self._quarantined) >= MOST_QUARANTINES:
                raise Conflict(f"{MOST_QUARANTINES} keys are in quarantine here already")
            kept = replace(record, reason=record.reason[:MAX_REASON])
            path = self._root / "quarantine" / record.key
            temporary = self._root / "incoming" / f"quarantine-{record.key}"
            temporary.write_text(json.dumps({f: getattr(kept, f) for f in Quarantine.__dataclass_fields__}))
            temporary.rename(path)
            self._quarantined[record.key] = kept
        _log.warning("cache.quarantined", cache_key=record.key, bundle=record.bundle, reason=kept.reason)

    def release(self, key: str) -> bool:
        """Ends a quarantine; what failed is removed with it, so that the next start compiles anew. False if none
        was."""
        with self._lock:
            if self._quarantined.pop(key, None) is None:
                return False
            (self._root / "quarantine" / key).unlink(missing_ok=True)
            name = self._by_key.get(key)
            if name is not None:
                self.drop(name)
            return True


class Incoming:
    """A bundle on its way in: chunks in order, each proven before the next; then `commit`. Always `close` it."""

    def __init__(self, store: Store, sealed: Sealed, manifest: Manifest, place: Path, last_use: float) -> None:
        self._store, self.sealed, self.manifest, self.place, self.last_use = store, sealed, manifest, place, last_use
        self._body = (place / "body").open("wb")
        self._next = 0

    def chunk(self, data: bytes | memoryview) -> None:
        """Takes the next chunk. Raises Denied when it is not what was signed, Unavailable when the disk is full."""
        bundle.prove(self.manifest, self._next, data)
        try:
            self._body.write(data)
        except OSError as error:
            raise Unavailable(f"the cache's disk takes no more: {error.strerror}", retry_after=60.0) from error
        self._next += 1

    def commit(self) -> None:
        """Makes the bundle known, if all of its body came. Raises InvalidInput otherwise, Conflict, Unavailable."""
        if self._next != len(self.manifest.chunks):
            raise InvalidInput(f"{self._next} of {len(self.manifest.chunks)} chunks came")
        try:
            self._body.flush()
            os.fsync(self._body.fileno())
            self._store.commit(self)
        except OSError as error:
            raise Unavailable(f"the cache's disk takes no more: {error.strerror}", retry_after=60.0) from error

    def close(self) -> None:
        """Ends it; without a commit nothing is left of it."""
        self._body.close()
        self._store.forget(self)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(path: Path) -> Sealed:
    signature = json.loads((path / "signature").read_bytes())
    return Sealed((path / "manifest").read_bytes(), str(signature["signer"]), bytes.fromhex(signature["signature"]))


def _write(place: Path, sealed: Sealed, last_use: float) -> None:
    said = {"signer": sealed.signer, "signature": sealed.signature.hex()}
    (place / "signature").write_text(json.dumps(said))
    (place / "manifest").write_bytes(sealed.manifest)
    os.utime(place / "manifest", (last_use, last_use))


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
