"""`python -m relight.agent.cache export|import DIR --config AGENT.json`: the ring's bundles into a directory and back.

Run where an agent runs: it reaches the ring by what that agent last heard of it. An export is complete when nothing is
named as failed; signatures travel along, and whoever imports must trust the signers (compile_cache.trusted_keys).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from relight.agent.cache import archive
from relight.agent.cache.archive import Carried
from relight.agent.cache.service import heard_before, reachable
from relight.agent.cache.signing import Signer
from relight.agent.cache.store import Store
from relight.agent.config import AgentConfig, load
from relight.core.clock import SystemClock
from relight.core.errors import InvalidInput, RelightError, Unavailable


def carry(action: str, directory: Path, config: AgentConfig) -> Carried:
    """Raises InvalidInput when the agent has no cache, Unavailable when it heard of no ring yet."""
    settings = config.cache_settings()
    if settings is None:
        raise InvalidInput("compile_cache is off in this configuration")
    heard = heard_before(settings.directory)
    if heard is None or not heard.nodes:
        raise Unavailable(
            f"the agent of {settings.directory} has not heard of a ring: does it run, and its controller?"
        )
    clock = SystemClock()
    own = (Signer.load(settings.directory / "signer.pem").public, *settings.trusted_keys)
    ring, trust = reachable(heard, own, clock, f"{config.slot} ({action})", config.weights_tls())
    if action == "import" and not (directory / "bundles").is_dir():
        raise InvalidInput(f"{directory} is no archive: it has no directory `bundles`")
    store = Store(directory, trust, clock, quota=1 << 62)
    return archive.export(ring, store) if action == "export" else archive.load(store, ring)


def main(words: list[str] | None = None) -> int:
    """Exit status 0 when all was carried, 1 when some was not, 2 when nothing could be."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.agent.cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("export", "import"))
    parser.add_argument("directory", type=Path, help="the archive: made by export, read by import")
    parser.add_argument("--config", type=Path, required=True, help="the configuration of an agent on this host")
    given = parser.parse_args(words)
    try:
        done = carry(given.action, given.directory.resolve(), load(given.config))
    except (RelightError, OSError) as error:
        print(f"relight cache: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(done)))
    return 1 if done.failed else 0


if __name__ == "__main__":
    sys.exit(main())
