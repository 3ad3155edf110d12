"""Checkpoints out of remote storage: whole and unchangeable, or refused by name; kept while they are wanted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from relight.agent.storage import fetch as fetching
from relight.agent.storage import remote
from relight.agent.storage.checkpoints import Checkpoints
from relight.agent.storage.fetch import File, fetch, release
from relight.agent.storage.remote import INDEX, Limits
from relight.core.clock import SystemClock
from relight.core.errors import LocalFault, RemoteFault, TransferError
from relight.core.records import Storage
from support.storage import Bucket, refuse, safetensors

ROOM = 1 << 20
ONE = safetensors(("a", bytes(range(256)) * 40), ("b", b"xyz"))
TWO = safetensors(("c", b"0123456789" * 300))
SHARDS = {
    "m-1.safetensors": ONE,
    "m-2.safetensors": TWO,
    INDEX: json.dumps({"weight_map": {"a": "m-1.safetensors", "c": "m-2.safetensors"}}).encode(),
}
KEY = ("default/m", "r1")


class Late(SystemClock):
    """Each look at it is a minute later."""

    def __init__(self) -> None:
        self._at = 0.0

    def monotonic(self) -> float:
        self._at += 60.0
        return self._at


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(remote, "_PAUSE", 0.0)
    monkeypatch.setattr(fetching, "PART", 4096)
    with Bucket({"model.safetensors": ONE}) as made:
        yield made


def _limits(seconds: float = 60.0) -> Limits:
    clock = SystemClock()
    return Limits(clock, clock.monotonic() + seconds)


def _fetch(bucket: Bucket, sha256: dict[str, str] | None = None, query: str = "", most: int = ROOM) -> dict[str, bytes]:
    files = fetch(bucket.uri + query, sha256 or {}, most, _limits(), lambda done, total: None)
    try:
        return {f.name: os.pread(f.descriptor, f.bytes, 0) for f in files}
    finally:
        release(files)


def _refused(bucket: Bucket, kind: type[TransferError] = RemoteFault, **how: object) -> str:
    with pytest.raises(kind) as caught:
        _fetch(bucket, **how)  # type: ignore[arg-type]
    assert _memories() == []
    return str(caught.value)


def _memories() -> list[str]:
    """Files in memory that this process still holds."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return [name for name in found if name.startswith("/memfd:relight-") and "safetensors" in name]


def test_a_checkpoint_of_one_file_and_one_with_an_index_come_whole(bucket: Bucket) -> None:
    assert _fetch(bucket) == {"model.safetensors": ONE}
    bucket.objects = dict(SHARDS)
    assert _fetch(bucket) == {name: data for name, data in SHARDS.items() if name != INDEX}


def test_what_was_fetched_cannot_be_changed_any_more(bucket: Bucket) -> None:
    files: tuple[File, ...] = fetch(bucket.uri, {}, ROOM, _limits(), lambda done, total: None)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(files[0].descriptor, b"x", 0)
    finally:
        release(files)


def test_what_broke_off_is_gone_on_with_from_where_it_was(bucket: Bucket) -> None:
    left = [100]

    def breaks(handler: BaseHTTPRequestHandler, name: str) -> bool:
        if handler.headers["Range"] != "bytes=4096-8191" or not left:
            return False
        bucket.serve(handler, name, left.pop())
        return True

    bucket.answer = breaks
    assert _fetch(bucket) == {"model.safetensors": ONE}
    assert "bytes=4196-8191" in [asked for _, asked in bucket.seen]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_an_answer_that_passes_is_waited_out_and_one_that_does_not_is_named(bucket: Bucket, status: int) -> None:
    answers = [status, status]

    def busy(handler: BaseHTTPRequestHandler, name: str) -> bool:
        if not answers:
            return False
        refuse(handler, answers.pop())
        return True

    bucket.answer = busy
    assert _fetch(bucket) == {"model.safetensors": ONE}
    answers += [status] * 100
    assert f"storage answers {status}, {remote.TRIES} times in a row" in _refused(bucket)


def test_an_object_that_changes_while_it_is_read_is_refused(bucket: Bucket) -> None:
    def changes(handler: BaseHTTPRequestHandler, name: str) -> bool:
        if handler.headers["Range"].startswith("bytes=4096-"):
            bucket.tags[name] = '"2"'
        return False

    bucket.answer = changes
    assert "model.safetensors: the whole object came instead of a range: it changed" in _refused(bucket)
    # Storage whose tags are weak takes no condition: then the tags themselves are compared.
    bucket.answer = lambda handler, name: False
    bucket.tags["model.safetensors"] = 'W/"1"'

    def weakly(handler: BaseHTTPRequestHandler, name: str) -> bool:
        if handler.headers["Range"].startswith("bytes=4096-"):
            bucket.tags[name] = 'W/"2"'
        return False

    bucket.answer = weakly
    size = len(ONE)
    assert f'changed while it was read: {size} bytes W/"1", then {size} bytes W/"2"' in _refused(bucket)


def test_a_truncated_object_is_told_by_its_own_header(bucket: Bucket) -> None:
    bucket.objects["model.safetensors"] = ONE[:-7]
    assert _refused(bucket) == f"model.safetensors has {len(ONE) - 7} bytes, and its own header says {len(ONE)}"
    bucket.objects["model.safetensors"] = b"<html>no such bucket</html>"
    assert _refused(bucket) == "model.safetensors: not a file of safetensors"


def test_other_bytes_than_were_promised_are_refused(bucket: Bucket) -> None:
    right = hashlib.sha256(ONE).hexdigest()
    assert _fetch(bucket, {"model.safetensors": right}) == {"model.safetensors": ONE}
    assert f"its sha256 is {right}, expected {'0' * 64}" in _refused(bucket, sha256={"model.safetensors": "0" * 64})


@pytest.mark.parametrize(("status", "said"), [(403, "storage answers 403"), (404, "storage answers 404")])
def test_a_refusal_is_named_at_once_and_without_the_secret_in_the_address(
    bucket: Bucket, status: int, said: str
) -> None:  # fmt: skip
    bucket.answer = lambda handler, name: refuse(handler, status) is None
    told = _refused(bucket, query="?sig=secret")
    assert said in told
    assert "secret" not in told
    assert [path for path, _ in bucket.seen] == [f"/b/{INDEX}?sig=secret", "/b/model.safetensors?sig=secret"]


def test_an_empty_object_and_storage_without_ranges_are_refused(bucket: Bucket) -> None:
    bucket.objects["model.safetensors"] = b""
    assert "the range is not there (416)" in _refused(bucket)
    bucket.answer = lambda handler, name: name != INDEX and refuse(handler, 200, ONE) is None
    assert "storage knows no ranges" in _refused(bucket)


def test_storage_that_is_too_slow_is_given_up(bucket: Bucket) -> None:
    with pytest.raises(RemoteFault, match="did not bring it in time"):
        fetch(bucket.uri, {}, ROOM, Limits(Late(), 300.0), lambda done, total: None)


def test_a_checkpoint_that_does_not_fit_is_not_begun(bucket: Bucket) -> None:
    assert f"{len(ONE)} bytes, and 10 are left" in _refused(bucket, LocalFault, most=10)
    assert len(bucket.seen) == 2


def test_a_redirect_is_followed_but_never_to_another_scheme(bucket: Bucket) -> None:
    def moved(handler: BaseHTTPRequestHandler, name: str) -> bool:
        if name != "model.safetensors" or handler.path.startswith("/elsewhere"):
            return False
        refuse(handler, 302, Location="/elsewhere/model.safetensors")
        return True

    bucket.answer = moved
    assert _fetch(bucket) == {"model.safetensors": ONE}
    bucket.answer = lambda handler, name: refuse(handler, 302, Location="https://127.0.0.1/x") is None
    assert "redirects from http to https, which is refused" in _refused(bucket)
    bucket.answer = lambda handler, name: refuse(handler, 302, Location="/b/again") is None
    assert "redirects more than" in _refused(bucket)


@pytest.mark.parametrize("names", [{"a": "../x.safetensors"}, {"a": "x.bin"}, {"a": 7}, {}])
def test_an_index_names_files_and_nothing_else(bucket: Bucket, names: dict[str, object]) -> None:
    bucket.objects[INDEX] = json.dumps({"weight_map": names}).encode()
    assert INDEX in _refused(bucket)


async def test_one_fetch_serves_all_who_want_it_and_its_memory_goes_with_the_last(
    bucket: Bucket, tmp_path: Path
) -> None:
    made = Checkpoints(tmp_path / "s", lambda: ROOM, SystemClock())
    heard: list[tuple[int, int]] = []

    async def use() -> bytes:
        async with made.held(KEY, Storage(bucket.uri), 60.0, lambda *told: heard.append(told)) as fetched:
            return (fetched.directory / "model.safetensors").read_bytes()

    assert await asyncio.gather(use(), use()) == [ONE, ONE]
    assert heard[-1] == (len(ONE), len(ONE))
    assert [path for path, asked in bucket.seen if asked == "bytes=0-4095"] == ["/b/model.safetensors"]
    assert made.bytes == 0
    await asyncio.sleep(0)
    assert list((tmp_path / "s").iterdir()) == []


async def test_what_was_fetched_ahead_stays_until_it_is_not_wanted_or_its_room_is(
    bucket: Bucket, tmp_path: Path
) -> None:
    made = Checkpoints(tmp_path / "s", lambda: ROOM, SystemClock())
    for end in (lambda: made.keep([]), made.shed, made.close):
        made.keep([KEY])
        async with made.held(KEY, Storage(bucket.uri), 60.0, lambda *told: None):
            pass
        assert made.bytes == len(ONE)
        asked = len(bucket.seen)
        async with made.held(KEY, Storage(bucket.uri), 60.0, lambda *told: None):
            assert len(bucket.seen) == asked
        end()
        assert made.bytes == 0


async def test_a_fetch_that_failed_is_tried_anew_by_the_next(bucket: Bucket, tmp_path: Path) -> None:
    made = Checkpoints(tmp_path / "s", lambda: ROOM, SystemClock())
    made.keep([KEY])
    bucket.answer = lambda handler, name: refuse(handler, 403) is None
    with pytest.raises(RemoteFault, match="403"):
        async with made.held(KEY, Storage(bucket.uri), 60.0, lambda *told: None):
            pass
    bucket.answer = lambda handler, name: False
    async with made.held(KEY, Storage(bucket.uri), 60.0, lambda *told: None) as fetched:
        assert f"{len(ONE)} bytes in 1 files from {bucket.uri}" in fetched.told
