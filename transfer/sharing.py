"""One read-only copy of weights for several receivers of a host: its pages are mapped where a receiver's own would lie.

A copy proves every byte when it is made and freezes then (Segment.freeze), so what it was proven to be it stays:
whoever maps it checks the seal, the manifest and that everything lies where it must, and hashes nothing again. A stray
write of a receiver goes to a page of its own, and hurts nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass

from relight.core.errors import LocalFault, RemoteFault
from relight.core.records import SourceRef
from relight.transfer.doors import READ_DEADLINE
from relight.transfer.manifest import WeightManifest
from relight.transfer.request import Wanted
from relight.transfer.segment import Segment
from relight.transfer.session import check_source
from relight.transfer.transports.shm import ShmReader


@dataclass(frozen=True, slots=True)
class Loan:
    """Pages of a copy that lie in a receiver's segment. While it is not ended the copy has a reader."""

    manifest: WeightManifest
    reader: ShmReader

    def end(self) -> None:
        """Lets the copy go; the segment must have been dropped before."""
        self.reader.close()


def borrow(segment: Segment, wanted: Wanted, peer: SourceRef) -> Loan:
    """Lays the pages of `peer` into `segment`. Raises RemoteFault or LocalFault, and the segment is empty then."""
    reader = ShmReader(peer.address, peer.grant, peer.instance, READ_DEADLINE)
    try:
        manifest = reader.describe()
        check_source(manifest, wanted, segment, peer.instance)
        if peer.manifest_digest and manifest.digest() != peer.manifest_digest:
            raise RemoteFault(f"{peer.instance} describes other weights than it offered")
        for tensor in manifest.tensors:
            if (ours := wanted.tensors[tensor.name].offset) != tensor.offset:
                raise LocalFault(f"{tensor.name} lies at {tensor.offset} in {peer.instance}, and at {ours} here")
        segment.lay(reader.descriptor)
        try:
            reader.finish()
        except RemoteFault:
            segment.drop()
            raise
    except BaseException:
        reader.close()
        raise
    return Loan(manifest, reader)
