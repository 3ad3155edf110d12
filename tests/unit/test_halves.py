"""What `make test` ends with, by how its two halves ended."""

from types import SimpleNamespace

import pytest

from tests import run


@pytest.mark.parametrize(("others", "engines", "status"), [(0, 0, 0), (1, 0, 1), (0, 2, 1), (0, -9, 1), (-11, 0, 1)])
def test_a_half_that_failed_or_was_killed_fails_the_whole(monkeypatch, capsys, others, engines, status):
    ended = {run.HALVES[0]: others, run.HALVES[1]: engines}
    monkeypatch.setattr(
        run, "_pytest", lambda marks, _: SimpleNamespace(wait=lambda: ended[marks], poll=lambda: ended[marks])
    )
    with capsys.disabled():
        assert run.main() == status
