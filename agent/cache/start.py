"""The seam between engine starts and the ring: `prepare` before the engine starts, `finish` when it serves (or
`abandon`).

Nothing in here stops a start. Whatever goes wrong, the engine is pointed at an empty directory of its own and
compiles, and the record says why. Blocking calls: the agent makes them in a thread.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from relight.agent.cache import outcome, trees
from relight.agent.cache.archive import StoredBundle
from relight.agent.cache.install import Installed, clear, install
from relight.agent.cache.key import CacheKey, Difference, EngineStart, describe
from relight.agent.cache.outcome import Outcome, Verdict
from relight.agent.cache.reading import Opened
from relight.agent.cache.ring import Absent, Claim, Present, Ring
from relight.agent.cache.sealing import sealing
from relight.agent.cache.signing import Signer
from relight.agent.cache.store import Store
from relight.agent.cache.trees import Tree
from relight.core.clock import Clock
from relight.core.errors import RelightError, Unavailable
from relight.core.logs import get_logger

_log = get_logger("agent.cache")
SETTLE_SECONDS = 30.0
"""How long `finish` waits for an engine to stop writing into its cache."""
_CODE_FAULTS = frozenset({-signal.SIGILL, -signal.SIGSEGV, -signal.SIGBUS})
"""Ends of a process that compiled code can cause: an engine that ran a bundle's code and died so accuses the bundle."""


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """What the cache did for one start. `reason` says why a bundle came or did not; times are in seconds."""

    key: str
    reason: str
    bundle: str = ""
    installed: Installed | None = None
    changed: tuple[Difference, ...] = ()
    """Why there was no bundle: the components in which the nearest known key differs."""
    waited: float = 0.0
    """For another engine that was compiling the same."""
    fetched: float = 0.0
    """Reading, proving and installing."""
    outcome: Outcome | None = None
    published: tuple[str, ...] = ()
    not_published: str = ""
    quarantined: str = ""
    saved: float | None = None
    """Against the start that compiled; None where an engine does not say what its own part took."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """How to start the engine: `environment` goes over what its driver sets. Hand it to `finish` or `abandon`."""

    environment: Mapping[str, str]
    record: CacheRecord
    root: Path
    key: CacheKey | None = None
    before: Tree = trees.NOTHING
    claim: Claim | None = None
    compile_seconds: float = 0.0


class CompileCache:
    """One node's use of the ring. Safe for threads."""

    def __init__(self, ring: Ring | None, signer: Signer, clock: Clock, *, archive: Store | None = None) -> None:
        """`archive` is asked before the ring: bundles that came with an image. Without a ring it is all there is."""
        self._ring, self._signer, self._clock, self._archive = ring, signer, clock, archive
        self._closing = threading.Event()

    def close(self) -> None:
        """Nothing waits any more for an engine to stop writing."""
        self._closing.set()

    def prepare(
        self, start: EngineStart, root: Path, wait_seconds: float, waits: Callable[[str], bool] = lambda _: True
    ) -> Prepared:
        """Makes `root` ready for this start, with a bundle in it if one can be had.

        `root` (absolute) belongs to this start alone, and what is there is removed. If another engine is compiling the
        same, it is waited for, at most `wait_seconds`; `waits` hears whose it is, and False ends that. Raises nothing.
        """
        begun = self._clock.monotonic()
        key: CacheKey | None = None
        environment: dict[str, str] = {}
        claim: Claim | None = None
        try:
            environment = trees.environment(start.engine, root)
            clear(root)
            key = describe(start)
            local = self._from_archive(key, root, begun)
            if local is not None:
                return replace(local, environment=environment)
            said = (
                self._ring.obtain(key, wait_seconds, waits) if self._ring else Absent("no ring, and no archive has it")
            )
            if isinstance(said, Present) and self._ring is not None:
                with self._ring.open(said, key) as remote:
                    got = self._installed(remote, key, root, begun + said.waited, f"from {', '.join(remote.gave)}")
                record = replace(got.record, waited=said.waited)
                return replace(got, environment=environment, record=record)
            if isinstance(said, Claim):
                claim, why, waited = said, said.why, said.waited
            elif isinstance(said, Absent):
                why, waited = said, self._clock.monotonic() - begun
            record = CacheRecord(key.digest, why.reason, changed=why.changed, waited=waited)
        except (RelightError, OSError) as error:
            record = CacheRecord(key.digest if key else "", f"no bundle: {error}")
        except Exception as error:  # noqa: BLE001 - a defect in here must not cost the start; it is logged as one
            _log.exception("cache.defect")
            record = CacheRecord(key.digest if key else "", f"no bundle: {type(error).__name__}")
        _log.info("cache.compiles", cache_key=record.key, reason=record.reason)
        return Prepared(environment, record, root, key, trees.NOTHING, claim)

    def _from_archive(self, key: CacheKey, root: Path, begun: float) -> Prepared | None:
        held = self._archive.find(key.digest) if self._archive else None
        if held is None or self._archive is None:
            return None
        try:
            return self._installed(StoredBundle(self._archive, held.bundle, key), key, root, begun, "from the archive")
        except (RelightError, OSError) as error:
            _log.warning("cache.archive", cache_key=key.digest, reason=str(error))
            return None

    def _installed(self, opened: Opened, key: CacheKey, root: Path, begun: float, reason: str) -> Prepared:
        installed = install(opened, root)
        took = self._clock.monotonic() - begun
        record = CacheRecord(key.digest, reason, opened.name, installed, fetched=took)
        _log.info("cache.installed", cache_key=key.digest, bundle=opened.name, bytes=installed.bytes, seconds=took)
        return Prepared({}, record, root, key, trees.scan(root, key.engine), None, opened.manifest.compile_seconds)

    def finish(self, prepared: Prepared, log: str, settle_seconds: float = SETTLE_SECONDS) -> CacheRecord:
        """What the engine made of it, once it serves and has answered a request with log-probabilities (the first one
        compiles too). `log` is what the engine wrote. Publishes what it compiled; quarantines what it failed to load.

        Raises nothing.
        """
        record, key = prepared.record, prepared.key
        try:
            if key is None:
                return record
            after = trees.scan(prepared.root, key.engine)
            seen = outcome.judge(log, prepared.before, after, installed=record.installed is not None)
            took = outcome.engine_seconds(log)
            record = replace(record, outcome=seen)
            if seen.hit and took is not None and prepared.compile_seconds:
                record = replace(record, saved=prepared.compile_seconds - took - record.fetched)
            if seen.verdict is Verdict.NOT_LOADED:
                return self._quarantine(record, key, seen.reason)
            if prepared.claim is not None:
                return self._publish(record, prepared, key, took or 0.0, settle_seconds)
            return record
        except (RelightError, OSError) as error:
            return replace(record, not_published=str(error))
        except Exception as error:  # noqa: BLE001 - as in prepare
            _log.exception("cache.defect")
            return replace(record, not_published=type(error).__name__)
        finally:
            if prepared.claim is not None:
                prepared.claim.release()

    def abandon(self, prepared: Prepared, log: str, exit_code: int | None) -> CacheRecord:
        """The start failed. `exit_code` is the engine's, minus a signal's number; None when it did not end by itself.

        Lets others compile. A bundle whose code the engine failed to load, or died in as only code can make it, is
        quarantined: the next start compiles. Raises nothing.
        """
        record, key = prepared.record, prepared.key
        if prepared.claim is not None:
            prepared.claim.release()
        if record.installed is None or key is None:
            return record
        failed = outcome.load_failure(log)
        if failed is None and exit_code not in _CODE_FAULTS:
            return record
        try:
            return self._quarantine(record, key, failed or f"the engine ended with {exit_code} on the bundle's code")
        except Exception as error:  # noqa: BLE001 - as in prepare
            _log.exception("cache.defect")
            return replace(record, not_published=type(error).__name__)

    def _quarantine(self, record: CacheRecord, key: CacheKey, reason: str) -> CacheRecord:
        heard = self._ring.quarantine(key, record.bundle, reason) if self._ring else []
        _log.warning("cache.quarantine", cache_key=key.digest, bundle=record.bundle, reason=reason, nodes=len(heard))
        return replace(record, quarantined=reason)

    def _publish(
        self, record: CacheRecord, prepared: Prepared, key: CacheKey, took: float, settle_seconds: float
    ) -> CacheRecord:
        if self._ring is None:
            return record
        until = self._clock.monotonic() + settle_seconds
        while True:
            try:
                with sealing(
                    prepared.root, key, self._signer, self._clock, compile_seconds=took, limits=self._ring.limits
                ) as tree:
                    done = self._ring.publish(tree)
                    seen, files = record.outcome, len(tree.manifest.files)
                    # It may have gone on compiling since it was judged; and all that is there is its own.
                    return replace(
                        record, bundle=tree.sealed.name, published=done.nodes, not_published="; ".join(done.refused),
                        outcome=replace(seen, compiled=files, reason=f"{files} artefacts are the engine's own")
                        if seen else None,
                    )  # fmt: skip
            except Unavailable as error:
                if self._clock.monotonic() + error.retry_after > until:
                    raise
                # The engine writes on: there is no event for "it has stopped", only time without one.
                if self._closing.wait(error.retry_after):
                    raise
