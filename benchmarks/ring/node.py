"""One cache node as a process of its own, for `make bench-ring`: told on standard input who the members are.

{"members": {name: address}, "revision": n, "repair": true}   answered with one line of JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relight.agent.cache.node import CacheNode
from relight.agent.cache.placement import Membership
from relight.agent.cache.signing import Trust
from relight.agent.cache.store import Store
from relight.core.clock import SystemClock
from relight.transfer import grants


def main() -> None:
    name, directory, public, key = sys.argv[1:]
    clock = SystemClock()
    store = Store(Path(directory), Trust([public]), clock, quota=1 << 34)
    node = CacheNode(name, store, key, clock, host="127.0.0.1")
    print(json.dumps({"address": node.address, "held": len(store.entries())}), flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        node.set_members(Membership(said["revision"], said["members"]))
        answer: dict[str, object] = {}
        if said["repair"]:
            done = node.repair(lambda other: grants.mint(key, grants.Claims(other, 0, "", name, clock.now() + 60)))
            answer = {"fetched": done.fetched, "dropped": done.dropped, "failed": list(done.failed)}
        print(json.dumps(answer), flush=True)
    node.close()


if __name__ == "__main__":
    main()
