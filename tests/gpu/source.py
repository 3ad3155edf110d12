"""A source in a process of its own: python source.py DEVICE KIND SOCKET. Ends with its standard input."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from relight.core.clock import SystemClock
from relight.core.errors import LocalFault
from relight.transfer import grants
from relight.transfer.source import Source
from relight.transfer.transports.cuda import Cuda
from relight.transfer.transports.nvlink import NvlinkListener
from tests.gpu.memory import allocate, fill


def main() -> None:
    device, kind, path = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    segment = allocate(Cuda(device), kind)
    source = Source("i-source", segment, fill(segment), SystemClock())
    source.open(1, key := grants.new_key())
    listener = NvlinkListener(path)
    try:
        address = listener.register(source)
    except LocalFault as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    claims = grants.Claims("i-source", 1, source.manifest_digest, "i-receiver", time.time() + 60)
    print(json.dumps({"address": address, "grant": grants.mint(key, claims)}), flush=True)
    sys.stdin.read()
    print(json.dumps({"cut": source.close(5.0)}), flush=True)
    listener.release()


if __name__ == "__main__":
    main()
