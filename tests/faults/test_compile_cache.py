"""Processes killed in the middle of keeping or installing a bundle: afterwards it is whole or absent, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cache import CPU_TREE, a_key, contents, sealed_tree

from relight.agent.cache.archive import StoredBundle
from relight.agent.cache.install import clear, install
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Store
from relight.core.clock import SystemClock

ROOT = Path(__file__).parents[2]
KEEP = """
import sys
from pathlib import Path
from tests.support.cache import sealed_tree
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Store
from relight.core.clock import SystemClock
root = Path(sys.argv[1])
signer = Signer.load(root / "key")
store = Store(root / "store", Trust([signer.public]), SystemClock(), quota=1 << 30)
with sealed_tree(root, signer) as tree, store.receive(tree.sealed) as incoming:
    incoming.chunk(tree.body.read_bytes())
    incoming.commit()
"""
INSTALL = """
import sys
from pathlib import Path
from relight.agent.cache.archive import StoredBundle
from relight.agent.cache.install import install
from relight.agent.cache.signing import Signer, Trust
from relight.agent.cache.store import Store
from relight.core.clock import SystemClock
root = Path(sys.argv[1])
store = Store(root / "store", Trust([Signer.load(root / "key").public]), SystemClock(), quota=1 << 30)
install(StoredBundle(store, store.entries()[0].bundle), root / "compile")
"""


def _run(script: str, root: Path, failpoint: str) -> int:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "RELIGHT_FAILPOINTS": failpoint}
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], env=env, timeout=60, capture_output=True, check=False
    )
    return done.returncode


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    made = Signer.new()
    made.save(tmp_path / "key")
    return made


def test_a_node_killed_before_a_bundle_is_in_its_place_takes_it_again(tmp_path: Path, signer: Signer) -> None:
    assert _run(KEEP, tmp_path, "cache.store.before-rename=exit") == 137
    store = Store(tmp_path / "store", Trust([signer.public]), SystemClock(), quota=1 << 30)
    assert store.find(a_key().digest) is None
    assert not contents(tmp_path / "store")
    assert _run(KEEP, tmp_path, "") == 0
    again = Store(tmp_path / "store", Trust([signer.public]), SystemClock(), quota=1 << 30)
    assert again.find(a_key().digest) is not None


def test_an_agent_killed_while_it_installs_leaves_nothing_to_see(tmp_path: Path, signer: Signer) -> None:
    store = Store(tmp_path / "store", Trust([signer.public]), SystemClock(), quota=1 << 30)
    with sealed_tree(tmp_path, signer) as tree:
        incoming = store.receive(tree.sealed)
        assert incoming is not None
        with incoming:
            incoming.chunk(tree.body.read_bytes())
            incoming.commit()
    place = tmp_path / "compile"
    assert _run(INSTALL, tmp_path, "cache.install.before-rename=exit") == 137
    assert not place.exists()
    assert list(tmp_path.glob("compile.staging-*"))
    clear(place)
    assert not list(tmp_path.glob("compile.staging-*"))
    install(StoredBundle(store, tree.sealed.name, a_key()), place)
    assert contents(place) == dict(CPU_TREE)
