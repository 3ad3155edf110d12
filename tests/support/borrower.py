"""A process that shares a frozen segment: `python borrower.py '{"address": ..., "grant": ..., "bytes": ...}'`.

It reads every byte, prints their digest as one JSON line, and stays until its input ends.
"""

from __future__ import annotations

import hashlib
import json
import sys

from relight.core.records import SourceRef
from relight.transfer.request import Wanted
from relight.transfer.segment import Segment
from relight.transfer.sharing import borrow
from relight.transfer.transports.shm import ShmReader


def main() -> None:
    told = json.loads(sys.argv[1])
    peer = SourceRef("i-source", "a", 1, "", "", told["address"], told["grant"])
    reader = ShmReader(peer.address, peer.grant, peer.instance, 5.0)
    manifest = reader.describe()
    reader.close()
    segment = Segment("borrower", told["bytes"])
    wanted = Wanted(manifest.fingerprint.layout, {t.name: t for t in manifest.tensors}, "r1")
    loan = borrow(segment, wanted, peer)
    print(json.dumps({"digest": hashlib.sha256(segment.view).hexdigest()}), flush=True)
    sys.stdin.read()
    segment.drop()
    loan.end()


if __name__ == "__main__":
    main()
