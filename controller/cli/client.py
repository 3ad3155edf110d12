"""The CLI's way to the controller: REST calls whose errors say what to do next, and the exit status of each."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from relight.core.clock import SystemClock
from relight.core.errors import Conflict, Denied, FieldError, InvalidInput, NotFound, RelightError, TooOld, Unavailable

EXIT = {
    "ok": 0,
    "operation failed": 1,
    "bad input": 2,
    "controller not reachable": 3,
    "not found": 4,
    "denied": 5,
    "conflict": 6,
}
"""Exit statuses, as `relight --help` documents them."""


def exit_status(error: RelightError) -> int:
    """The exit status that tells a script what kind of failure it was."""
    kinds: list[tuple[type[RelightError], str]] = [
        (InvalidInput, "bad input"),
        (NotFound, "not found"),
        (Denied, "denied"),
        (Conflict, "conflict"),
        (Unavailable, "controller not reachable"),
    ]
    return next((EXIT[name] for kind, name in kinds if isinstance(error, kind)), EXIT["operation failed"])


def _raise(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        problem = answer.json()
    except ValueError:
        problem = {}
    text = problem.get("detail") or problem.get("title") or answer.text[:200] or answer.reason_phrase
    kinds: dict[int, type[RelightError]] = {
        400: InvalidInput, 401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 410: TooOld, 412: Conflict,
        422: InvalidInput, 429: Unavailable, 503: Unavailable,
    }  # fmt: skip
    details = "; ".join(
        f"{e.get('field')}: expected {e.get('expected')}, got {e.get('got')}"
        for e in problem.get("errors") or []
        if str(e.get("field")) not in text
    )
    raise kinds.get(answer.status_code, RelightError)(f"{text}{': ' + details if details else ''}")


CALL_SECONDS = 90.0
"""Longer than the longest wait that the controller grants."""


def _trusting(authority: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        wrong = FieldError("RELIGHT_CA", "a PEM file of an authority", f"{authority} ({error})")
        raise InvalidInput("no way to the controller", [wrong]) from error


def _parameters(query: Mapping[str, object]) -> dict[str, str]:
    return {k: str(v) for k, v in query.items() if v is not None}


class Client:
    """One controller, one identity."""

    def __init__(self, url: str, token: str, authority: str = "") -> None:
        """`authority`: a PEM file of whom the controller's certificate is; without it, the system's count."""
        self.url = url
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=30.0, trust_env=False,
            verify=_trusting(authority) if authority else True,
        )  # fmt: skip

    def call(self, method: str, path: str, *, body: object = None, query: Mapping[str, object] | None = None) -> Any:
        """The answer's JSON. Raises by what to do next; Unavailable when nobody answers."""
        parameters = _parameters(query or {})
        headers = {"content-type": "application/json"} if body is not None else {}
        headers["x-request-start"] = f"t={SystemClock().now():.6f}"
        try:
            answer = self._http.request(
                method, path, params=parameters, content=None if body is None else json.dumps(body), headers=headers,
                timeout=CALL_SECONDS,
            )  # fmt: skip
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        _raise(answer)
        return answer.json() if answer.content else None

    def _unreachable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"no controller answers at {self.url} ({str(error) or type(error).__name__}): with --server check the "
            "address, and RELIGHT_CA for https; on this machine see logs/controller.log of the state directory, or "
            "start anew (`relight down`, `relight up -f FILE`)"
        )

    def items(self, path: str, **query: object) -> list[dict[str, Any]]:
        """All items of a list, page by page."""
        found: list[dict[str, Any]] = []
        token: str | None = None
        while True:
            page = self.call("GET", path, query={**query, "continue": token})
            found += page["items"]
            token = page.get("continue")
            if not token:
                return found

    def stream(
        self, path: str, query: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> Iterator[bytes]:
        """The bytes of an endless answer, as they come."""
        endless = httpx.Timeout(CALL_SECONDS, read=None)
        try:
            with self._http.stream("GET", path, params=_parameters(query), headers=headers, timeout=endless) as answer:
                if not answer.is_success:
                    answer.read()
                    _raise(answer)
                yield from answer.iter_bytes()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
