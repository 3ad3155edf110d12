"""A ring of three nodes in this process, over real sockets and directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cache import Nodes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "nodes")
    made.start("a", "b", "c")
    yield made
    made.close()
