"""The store of a cluster when its server dies, hangs, forgets, goes back in time, fills up or was set up wrongly."""

from __future__ import annotations

import asyncio
import shutil
import socket
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from relight.controller.cli import pki
from relight.controller.state.access import Password, RedisConfig, RedisTls, Sentinels
from relight.controller.state.base import ABSENT, Write
from relight.controller.state.catalog import Catalog, SlotFacts, put
from relight.controller.state.redis import RedisStore
from relight.core.clock import SystemClock
from relight.core.errors import Conflict, Denied, Fenced, InvalidInput, TooOld, Unavailable
from support.hostcopies import until
from support.redisserver import RedisServer

DEADLINE = 20


@pytest.fixture
def server():
    running = RedisServer()
    yield running
    running.close()


async def opened(server: RedisServer, **changes) -> RedisStore:
    return await RedisStore.open(RedisConfig(url=server.url, **changes), SystemClock())


@pytest.fixture
async def store(server):
    store = await opened(server)
    yield store
    await store.close()


async def watched(store: RedisStore, revision: int):
    """The first change after `revision`."""
    async with asyncio.timeout(DEADLINE), aclosing(store.watch("", revision)) as changes:
        return await anext(changes)


async def reconnected(store: RedisStore) -> None:
    """Spends the one call by which a store learns that its connection is gone."""
    with suppress(Unavailable):
        await store.get("a")


async def test_every_acknowledged_write_outlives_a_killed_server_and_no_other_is_half_done(server, store):
    acknowledged: dict[str, int] = {}

    async def write(n: int) -> None:
        with suppress(Unavailable):
            pair = [Write(f"a/{n}", b"1"), Write(f"b/{n}", b"1")]
            acknowledged[f"b/{n}"] = await store.commit(pair, expect={f"a/{n}": ABSENT})
            if len(acknowledged) == 40:
                server.kill()

    await asyncio.gather(*(write(n) for n in range(200)))
    server.start()
    entries, _ = await store.list("")
    kept = {e.key: e.revision for e in entries}
    assert acknowledged.items() <= kept.items()
    assert {k[2:] for k in kept if k.startswith("a/")} == {k[2:] for k in kept if k.startswith("b/")}
    assert len(acknowledged) < 200


async def test_a_write_that_was_done_and_reported_failed_is_found_by_reading(server):
    async with Lossy(server.socket) as proxy:
        store = await RedisStore.open(RedisConfig(url=f"unix://{proxy.path}"), SystemClock())
        await store.commit([Write("before", b"1")])
        proxy.lose_replies = True
        with pytest.raises(Unavailable):
            await store.commit([Write("a", b"1")], expect={"a": ABSENT})
        proxy.lose_replies = False
        assert (await store.get("a")).value == b"1"
        with pytest.raises(Conflict):
            await store.commit([Write("a", b"1")], expect={"a": ABSENT})
        await store.close()


async def test_a_server_that_hangs_is_unavailable_within_the_time_given(server):
    store = await opened(server, timeout_seconds=0.2)
    await store.commit([Write("before", b"1")])
    server.pause()
    with pytest.raises(Unavailable):
        await store.commit([Write("a", b"1")])
    server.resume()
    # It did it after all: that is for the caller to find out.
    until(lambda: server.client().hexists(store.keys["values"], "a"), bool)
    await store.close()


async def test_calls_that_were_cancelled_leave_no_reply_to_the_next(store):
    for n in range(100):
        await store.commit([Write(f"k/{n}", str(n).encode())])
    for n in range(100):
        cancelled = asyncio.create_task(store.get(f"k/{n}"))
        for _ in range(n % 7):
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert (await store.get(f"k/{99 - n}")).value == str(99 - n).encode()


async def test_watchers_of_an_emptied_server_are_told_so_though_nothing_is_written(server, store):
    lease = await store.acquire("lead", "a", 60)
    revision = await store.commit([Write("a", b"1")])
    watching = asyncio.create_task(watched(store, revision))
    await asyncio.sleep(0)
    server.client().flushall()
    with pytest.raises(TooOld):
        await watching
    with pytest.raises(Fenced):
        await store.commit([Write("a", b"2")], fence=lease)
    entries, now = await store.list("")
    assert entries == []
    assert now > revision
    assert (await store.acquire("lead", "a", 60, above_epoch=lease.epoch)).epoch > lease.epoch


async def test_a_catalog_follows_a_server_that_was_emptied_and_filled_again(server, store):
    catalog = Catalog(store)
    await catalog.start()
    told: list[frozenset[str]] = []
    catalog.listen(told.append)
    slot = SlotFacts("s", "h", "b", "127.0.0.1:1")
    await catalog.commit([put("slots", "old", slot)])
    server.client().flushall()
    async with asyncio.timeout(DEADLINE):
        await catalog.commit([put("slots", "new", slot)])
    assert set(catalog.slots) == {"new"}
    assert any("slots/old" in keys for keys in told[1:])
    await catalog.stop()


async def test_a_server_that_lacks_the_newest_writes_gives_no_revision_twice(server, store, tmp_path):
    """As after a fail-over to a replica that was behind."""
    kept = await store.commit([Write("a", b"kept")])
    server.kill()
    shutil.copytree(server.folder / "appendonlydir", tmp_path / "behind")
    server.start()
    await reconnected(store)
    lost = await store.commit([Write("a", b"lost")], expect={"a": kept})
    server.kill()
    shutil.rmtree(server.folder / "appendonlydir")
    shutil.copytree(tmp_path / "behind", server.folder / "appendonlydir")
    server.start()
    other = await opened(server)
    again = await other.commit([Write("a", b"other")], expect={"a": kept})
    assert again > lost
    await reconnected(store)
    with pytest.raises(Conflict):
        await store.commit([Write("a", b"mine")], expect={"a": lost})
    with pytest.raises(TooOld):
        await watched(store, lost)
    await other.close()


async def test_the_history_is_bounded_and_who_lags_behind_it_is_told(server):
    store = await opened(server, history=100)
    (_, start) = await store.list("")
    for n in range(150):
        last = await store.commit([Write("a", str(n).encode())])
    with pytest.raises(TooOld):
        await watched(store, start)
    assert (await watched(store, last - 100)).value == b"50"
    assert server.client().xlen(store.keys["changes"]) == 100
    await store.close()


async def test_a_full_server_refuses_a_write_as_a_whole(server, store):
    revision = await store.commit([Write("a", b"1"), Write("gone", b"1")])
    server.client().config_set("maxmemory", "1mb")
    for writes in ([Write("a", b"2")], [Write("gone", None), Write("a", b"2")]):
        with pytest.raises(Unavailable, match="memory"):
            await store.commit(writes)
    server.client().config_set("maxmemory", "0")
    entries, now = await store.list("")
    assert (now, [(e.key, e.value) for e in entries]) == (revision, [("a", b"1"), ("gone", b"1")])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"], "maxmemory-policy: expected noeviction"),
        (["--cluster-enabled", "yes", "--port", "0"], "cluster-enabled: expected no"),
    ],
)
async def test_a_server_that_would_lose_state_is_refused_with_what_to_set(options, expected):
    if "--cluster-enabled" in options:
        options = [*options[:-1], str(free_port()), "--cluster-port", str(free_port())]
    server = RedisServer(*options)
    with pytest.raises(InvalidInput, match=expected):
        await opened(server)
    server.close()


async def test_data_of_another_version_is_left_alone(server, store):
    await store.commit([Write("a", b"1")])
    server.client().hset(store.keys["meta"], "schema", 7)
    with pytest.raises(Conflict, match="schema 7"):
        await opened(server)


async def test_two_prefixes_of_one_server_know_nothing_of_each_other(server, store):
    other = await opened(server, prefix="other")
    await store.commit([Write("a", b"1")])
    await store.acquire("lead", "a", 60)
    assert (await other.list(""))[0] == []
    assert (await other.acquire("lead", "b", 60)).epoch == 1
    assert all(key.startswith((b"{relight}:", b"{other}:")) for key in server.client().scan_iter())
    await other.close()


async def test_a_password_is_read_from_its_file_for_each_connection_over_tls(tmp_path):
    pki.make(tmp_path / "pki", ("redis",), SystemClock())
    authority, certificate, private_key = (tmp_path / "pki" / name for name in ("ca.pem", "redis.pem", "redis.key"))
    port = free_port()
    server = RedisServer(
        "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(private_key),
        "--tls-ca-cert-file", str(authority), "--tls-auth-clients", "no", "--requirepass", "first",
    )  # fmt: skip
    file = tmp_path / "password"
    file.write_text("first\n")
    config = RedisConfig(
        url=f"rediss://127.0.0.1:{port}", password=Password(file=file), tls=RedisTls(authority=authority)
    )
    store = await RedisStore.open(config, SystemClock())
    await store.commit([Write("a", b"1")])
    file.write_text("second\n")
    with pytest.raises(Denied) as caught:
        await RedisStore.open(config, SystemClock())
    assert "second" not in str(caught.value)
    with pytest.raises(Unavailable, match="certificate"):
        await RedisStore.open(config.model_copy(update={"tls": None}), SystemClock())
    await store.close()
    server.close()


async def test_a_store_behind_sentinels_goes_on_with_the_replica_when_its_master_died(tmp_path):
    ports = [free_port() for _ in range(3)]
    master, replica = (RedisServer("--port", str(port)) for port in ports[:2])
    replica.client().replicaof("127.0.0.1", ports[0])
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"sentinel monitor relight 127.0.0.1 {ports[0]} 1\nsentinel down-after-milliseconds relight 300\n"
        "sentinel failover-timeout relight 2000\n"
    )
    sentinel = RedisServer("--sentinel", "--port", str(ports[2]), file=config)
    until(lambda: replica.client().info("replication")["master_link_status"] == "up", bool)
    until(lambda: sentinel.client().execute_command("SENTINEL", "REPLICAS", "relight"), bool)
    watchers = Sentinels(addresses=(f"127.0.0.1:{ports[2]}",), service="relight")
    store = await RedisStore.open(RedisConfig(sentinels=watchers, timeout_seconds=1.0), SystemClock())
    revision = await store.commit([Write("a", b"1")])
    until(lambda: replica.client().exists(store.keys["values"]), bool)
    with pytest.raises(Unavailable, match="replica"):
        await opened(replica)
    master.kill()

    async with asyncio.timeout(DEADLINE):
        while True:
            with suppress(Unavailable):
                assert await store.commit([Write("b", b"2")], expect={"a": revision}) > revision
                break
            await asyncio.sleep(0.05)
    with pytest.raises(TooOld):
        await watched(store, revision)
    await store.close()
    for running in (sentinel, replica, master):
        running.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Lossy:
    """Between a store and its server; loses replies when told to, and the connection with them."""

    def __init__(self, target: Path) -> None:
        self._target, self.path, self.lose_replies = target, target.with_name("lossy"), False

    async def __aenter__(self) -> Lossy:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(self._target)

        async def forward() -> None:
            while data := await reader.read(1 << 16):
                outer.write(data)
            outer.close()

        forwarding = asyncio.create_task(forward())
        while (data := await inner.read(1 << 16)) and not self.lose_replies:
            writer.write(data)
        writer.close()
        await forwarding
        await outer.wait_closed()
