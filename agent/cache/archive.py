"""Bundles in a directory: carried into a cluster without a network, or baked into an image. A store is the format.

An archive holds what the ring holds, signatures included: whoever reads it trusts the signers, not the carrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relight.agent.cache import bundle
from relight.agent.cache.key import CacheKey
from relight.agent.cache.reading import file_chunks
from relight.agent.cache.ring import Present, Ring
from relight.agent.cache.sealing import SealedTree
from relight.agent.cache.store import Store
from relight.core.errors import RelightError


@dataclass(frozen=True, slots=True)
class Carried:
    """Bundles that are on the other side now (those that were there already included), and why others are not."""

    bundles: tuple[str, ...]
    failed: tuple[str, ...]


class StoredBundle:
    """A bundle of a store, to be installed from. Raises NotFound, Denied, InvalidInput."""

    def __init__(self, store: Store, name: str, key: CacheKey | None = None) -> None:
        """With `key` the bundle has to be that key's."""
        self.name = name
        self.manifest = bundle.verify(store.sealed(name), store.trust, store.limits, key)
        self._store = store

    def chunks(self) -> Iterator[memoryview]:
        with self._store.open_body(self.name) as body:
            for number, chunk in enumerate(file_chunks(body, self.manifest.body_bytes)):
                bundle.prove(self.manifest, number, chunk)
                yield memoryview(chunk)


def export(ring: Ring, archive: Store, keys: frozenset[str] | None = None) -> Carried:
    """Copies the ring's bundles (of `keys`, digests, when given) into an archive. What fails is named, the rest goes
    on."""
    done: list[str] = []
    failed: list[str] = []
    for name, (holding, nodes) in sorted(ring.holdings().items()):
        if keys is not None and holding.key not in keys:
            continue
        try:
            with ring.open(Present(name, holding.bytes, nodes), use=False) as remote:
                incoming = archive.receive(remote.sealed, holding.last_use)
                if incoming is not None:
                    with incoming:
                        for chunk in remote.chunks():
                            incoming.chunk(chunk)
                        incoming.commit()
            done.append(name)
        except RelightError as error:
            failed.append(f"{name[:16]}: {error}")
    return Carried(tuple(done), tuple(failed))


def load(archive: Store, ring: Ring) -> Carried:
    """Publishes an archive's bundles to the ring. Each is proven by the nodes that take it."""
    done: list[str] = []
    failed: list[str] = []
    for holding in archive.entries():
        try:
            stored = StoredBundle(archive, holding.bundle)
            ring.publish(SealedTree(archive.sealed(holding.bundle), stored.manifest, archive.body(holding.bundle)))
            done.append(holding.bundle)
        except RelightError as error:
            failed.append(f"{holding.bundle[:16]}: {error}")
    return Carried(tuple(done), tuple(failed))
