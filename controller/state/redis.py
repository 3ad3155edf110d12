"""The store of a cluster: Redis or Valkey, by scripts that are atomic there (redis_scripts.py).

The one place that imports the client library.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from relight.controller.state import redis_scripts as scripts
from relight.controller.state.access import Password, RedisConfig, RedisTls
from relight.controller.state.base import Change, Entry, Lease, Write
from relight.core.clock import Clock
from relight.core.errors import Conflict, Denied, Fenced, FieldError, InvalidInput, TooOld, Unavailable
from relight.core.logs import get_logger

OLDEST = (6, 2)
BATCH = 256
LISTEN_SECONDS = 2.0
"""How long a watcher listens before it looks by itself: what vanished wakes nobody."""

log = get_logger("controller.redis")


class _Credentials(CredentialProvider):
    """Asked for every connection: a password that was changed in its file needs no restart."""

    def __init__(self, username: str, password: Password) -> None:
        self._username, self._password = username, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        if self._password.file is not None:
            secret = self._password.file.read_text().removesuffix("\n")
        else:
            secret = os.environ.get(self._password.environment, "")
        return (self._username, secret) if self._username else (secret,)


def _tls(tls: RedisTls) -> dict[str, Any]:
    return {
        "ssl_ca_certs": str(tls.authority) if tls.authority else None,
        "ssl_certfile": str(tls.certificate) if tls.certificate else None,
        "ssl_keyfile": str(tls.private_key) if tls.private_key else None,
    }


def _connect(config: RedisConfig, patience: float) -> tuple[Redis, ...]:
    """A client that connects when it is first used, and those that it asks for the master in turn.

    An answer may take `patience` longer than is usual.
    """
    options: dict[str, Any] = {
        "socket_timeout": config.timeout_seconds + patience,
        "socket_connect_timeout": config.timeout_seconds,
        # Never by itself: a write that may have been done must not be done again.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if config.password is not None:
        options["credential_provider"] = _Credentials(config.username, config.password)
    if config.tls is not None:
        options |= _tls(config.tls)
    if config.sentinels is None:
        return (Redis.from_url(config.url, **options),)
    if config.tls is not None:
        options["ssl"] = True
    own = dict(options)
    own.pop("credential_provider", None)
    if config.sentinels.password is not None:
        own["credential_provider"] = _Credentials("", config.sentinels.password)
    addresses = [(host, int(port)) for host, _, port in (a.rpartition(":") for a in config.sentinels.addresses)]
    watchers = Sentinel(addresses, sentinel_kwargs=own, **options)  # type: ignore[no-untyped-call]
    return watchers.master_for(config.sentinels.service), *watchers.sentinels


class RedisStore:
    """See Store. Open one by `open`."""

    def __init__(self, config: RedisConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._clients = _connect(config, 0.0), _connect(config, LISTEN_SECONDS)
        self._client, self._listening = (clients[0] for clients in self._clients)
        self.keys = {name: f"{{{config.prefix}}}:{name}" for name in scripts.KEYS}
        self._seen = 0
        self._digests: dict[str, str] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()

    @classmethod
    async def open(cls, config: RedisConfig, clock: Clock) -> RedisStore:
        """Connects and looks whether the server can hold state.

        Raises InvalidInput when its settings would lose some, Denied when it does not know the user, Conflict when the
        data is of another version, Unavailable when it cannot be reached.
        """
        store = cls(config, clock)
        try:
            await store._check()
        except BaseException:
            await store.close()
            raise
        return store

    async def _check(self) -> None:
        try:
            about = await self._client.info()
            _refuse(about)
            schema = await self._client.hget(self.keys["meta"], "schema")
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            raise Denied(f"the Redis server refused this user: {error}") from None
        except (exceptions.RedisError, OSError) as error:
            raise _unavailable(error) from error
        if schema is not None and int(schema) != scripts.SCHEMA:
            raise Conflict(
                f"prefix {self._config.prefix} has schema {int(schema)}, this version knows {scripts.SCHEMA} only"
            )
        if not about.get("aof_enabled"):
            log.warning("redis.not-durable", expected="appendonly yes", got="no")

    async def _call(self, script: str, *arguments: str | bytes | int) -> list[Any]:
        words = [*self.keys.values(), self._seen, *arguments]
        try:
            found = await self._ask(self._client.evalsha, self._digest(script), len(self.keys), *words)
        except exceptions.NoScriptError:
            # The server is a new one, or was told to forget: refused before anything was done.
            found = await self._ask(self._client.eval, script, len(self.keys), *words)
        return list(found)

    async def _ask(self, call: Callable[..., Awaitable[Any]], *words: Any) -> Any:
        """What the server answers. The call itself is not cancelled with its caller.

        The library now and then swallows the cancellation of a call that is just being answered: who waits for a task
        to end by it would wait for ever.
        """
        if self._ended.is_set():
            raise Unavailable("the store is closed")
        task = asyncio.ensure_future(call(*words))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        try:
            return await asyncio.shield(task)
        except exceptions.NoScriptError:
            raise
        except (exceptions.RedisError, OSError) as error:
            raise _unavailable(error) from error

    def _digest(self, script: str) -> str:
        if script not in self._digests:
            # How Redis names scripts; nothing is secured by it.
            self._digests[script] = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        return self._digests[script]

    def _saw(self, revision: int) -> int:
        self._seen = max(self._seen, revision)
        return revision

    async def get(self, key: str) -> Entry | None:
        stored: Any = await self._ask(self._client.hget, self.keys["values"], key)
        return None if stored is None else self._entry(key, stored)

    def _entry(self, key: str, stored: bytes) -> Entry:
        revision, _, value = stored.partition(b":")
        return Entry(key, value, self._saw(int(revision)))

    async def list(self, prefix: str) -> tuple[list[Entry], int]:
        revision, *found = await self._call(scripts.LIST, prefix)
        pairs = zip(found[::2], found[1::2], strict=True)
        return [self._entry(key.decode(), stored) for key, stored in pairs], self._saw(int(revision))

    async def commit(
        self, writes: Sequence[Write], *, expect: Mapping[str, int] | None = None, fence: Lease | None = None
    ) -> int:
        words: list[str | bytes | int] = [self._config.history]
        words += [fence.name, fence.holder, fence.epoch] if fence else ["", "", ""]
        words.append(len(expect or {}))
        for key, wanted in (expect or {}).items():
            words += [key, wanted]
        for write in writes:
            words += [write.key, "delete", b""] if write.value is None else [write.key, "put", write.value]
        match await self._call(scripts.COMMIT, *words):
            case [b"done", revision]:
                return self._saw(int(revision))
            case [b"conflict", key, present]:
                wanted = (expect or {})[key.decode()]
                raise Conflict(f"{key.decode()} is at revision {int(present)}, not at {wanted}")
            case [b"fenced", holder, epoch] if fence:
                raise _fenced(fence, holder, epoch)
            case other:
                raise Unavailable(f"the store answered {other!r} to a commit")

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[Change, None]:
        after = from_revision
        while not self._ended.is_set():
            status, *found = await self._call(scripts.CHANGES, after, BATCH)
            if status != b"done":
                oldest, newest = map(int, found)
                raise TooOld(f"revision {after} is not in the history, which has {oldest} to {newest}")
            for identity, fields in found[0]:
                after = self._saw(int(identity.partition(b"-")[0]))
                told = dict(zip(fields[::2], fields[1::2], strict=True))
                key = told[b"key"].decode()
                if key.startswith(prefix):
                    yield Change(key, told.get(b"value"), after)
            if not found[0]:
                await self._listen(after)

    async def _listen(self, after: int) -> None:
        """Returns when there is a change after `after`, when it is time to look anyway, or when the store ends."""
        block = int(LISTEN_SECONDS * 1000)
        news = asyncio.ensure_future(self._listening.xread({self.keys["changes"]: f"{after}-0"}, count=1, block=block))
        end = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({news, end}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.is_set():
                news.result()
        except (exceptions.RedisError, OSError) as error:
            raise _unavailable(error) from error
        finally:
            news.cancel()
            end.cancel()
            await asyncio.gather(news, end, return_exceptions=True)

    async def acquire(self, name: str, holder: str, ttl_seconds: float, *, above_epoch: int = 0) -> Lease:
        expires_at = self._clock.now() + ttl_seconds
        match await self._call(scripts.ACQUIRE, name, holder, _ms(ttl_seconds), above_epoch):
            case [b"done", epoch]:
                return Lease(name, holder, int(epoch), expires_at)
            case [b"held", other, left]:
                raise Conflict(f"lease {name} is held by {other.decode()} for {int(left) / 1000:.1f} s more")
            case other:
                raise Unavailable(f"the store answered {other!r} to an acquisition")

    async def renew(self, lease: Lease, ttl_seconds: float) -> Lease:
        expires_at = self._clock.now() + ttl_seconds
        status, *newest = await self._call(scripts.RENEW, lease.name, lease.holder, lease.epoch, _ms(ttl_seconds))
        if status != b"done":
            raise _fenced(lease, *newest)
        return Lease(lease.name, lease.holder, lease.epoch, expires_at)

    async def release(self, lease: Lease) -> None:
        await self._call(scripts.RENEW, lease.name, lease.holder, lease.epoch, 0)

    async def compact(self, revision: int) -> None:
        await self._call(scripts.COMPACT, revision)

    async def close(self) -> None:
        self._ended.set()
        await asyncio.gather(*self._asked, return_exceptions=True)
        for client in chain(*self._clients):
            await client.aclose()


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _fenced(lease: Lease, holder: bytes, epoch: bytes) -> Fenced:
    newest = f"{holder.decode()} holds epoch {int(epoch)}" if holder else "nobody holds it"
    return Fenced(f"lease {lease.name}, epoch {lease.epoch} of {lease.holder}, is over: {newest}")


def _unavailable(error: Exception) -> Unavailable:
    return Unavailable(f"the Redis server failed: {type(error).__name__}: {error}")


def _refuse(about: Mapping[str, Any]) -> None:
    """Raises InvalidInput for a server that would lose state or lacks what is needed, Unavailable for a replica."""
    wrong = []
    version = str(about.get("redis_version", "0"))
    if tuple(int(n) for n in version.split(".")[:2]) < OLDEST:
        wrong.append(FieldError("redis version", "6.2 or newer", version))
    policy = str(about.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        wrong.append(FieldError("maxmemory-policy", "noeviction (in redis.conf): state must stay", policy))
    if about.get("cluster_enabled"):
        wrong.append(FieldError("cluster-enabled", "no: a server of its own, or one behind sentinels", "yes"))
    if wrong:
        raise InvalidInput("the Redis server cannot hold Relight's state", wrong)
    if about.get("role") != "master":
        raise Unavailable("the Redis server is a replica: the master is needed")
