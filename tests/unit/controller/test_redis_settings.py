"""Where the state lies: one store, said without contradiction and without a password in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relight.controller.config import load
from relight.core.errors import InvalidInput

URL = "redis://redis.example:6379/0"
SENTINELS = {"addresses": ["s:26379"], "service": "relight"}


def loaded(tmp_path: Path, **store: Any):
    path = tmp_path / "controller.json"
    path.write_text(json.dumps({"http": {"port": 0}, "grpc": {"port": 0}, "tokens": [], **store}))
    return load(path)


@pytest.mark.parametrize(
    "redis",
    [
        {"url": URL},
        {"url": "rediss://h", "tls": {"authority": "/ca.pem"}, "username": "u", "password": {"file": "/p"}},
        {"url": "unix:///run/redis.sock"},
        {"sentinels": {**SENTINELS, "password": {"environment": "P"}}, "prefix": "east"},
    ],
)
def test_a_server_is_named_by_its_url_or_by_its_sentinels(tmp_path: Path, redis: dict[str, Any]) -> None:
    assert loaded(tmp_path, redis=redis).redis.model_dump(exclude_unset=True, mode="json") == redis


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ({}, "either `state_path` or `redis`"),
        ({"state_path": "/s", "redis": {"url": URL}}, "either `state_path` or `redis`"),
        ({"redis": {}}, "either `url` or `sentinels`"),
        ({"redis": {"url": URL, "sentinels": SENTINELS}}, "either `url` or `sentinels`"),
        ({"redis": {"url": "http://h"}}, "redis://host:port/db"),
        ({"redis": {"url": URL, "tls": {}}}, "rediss://"),
        ({"redis": {"url": "rediss://h", "tls": {"certificate": "/c"}}}, "go together"),
        ({"redis": {"url": URL, "username": "u"}}, "needs a `password`"),
        ({"redis": {"url": URL, "password": {}}}, "either `file` or `environment`"),
        ({"redis": {"url": URL, "prefix": "{a}"}}, "lower-case letters"),
    ],
)
def test_what_contradicts_itself_is_refused_with_what_was_expected(
    tmp_path: Path, store: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        loaded(tmp_path, **store)
    assert expected in str(caught.value)


def test_a_password_in_the_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        loaded(tmp_path, redis={"url": "redis://user:hunter2@redis.example"})
    assert "hunter2" not in str(caught.value)
