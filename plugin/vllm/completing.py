"""What a worker that started lazily still has to do, and the one call that does it: `relight_complete`."""

from __future__ import annotations

from collections.abc import Callable

Piece = Callable[[], object]


class Completing:
    """Mixed into the workers, ahead of vLLM's own class."""

    _relight_rest: tuple[Piece, ...] = ()

    def relight_complete(self) -> int:
        """Called by `collective_rpc`, between steps: does the next piece of what a lazy start left out.

        Returns how many pieces are left. A piece that fails stays the next one.
        """
        if self._relight_rest:
            piece, *rest = self._relight_rest
            piece()
            self._relight_rest = tuple(rest)
        return len(self._relight_rest)
