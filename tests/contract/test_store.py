"""What every store implementation must do."""

import asyncio
from contextlib import aclosing

import pytest

from relight.controller.state.base import ABSENT, Change, Write
from relight.core.errors import Conflict, Fenced, TooOld, Unavailable


async def take(iterator, count):
    found = []
    async with asyncio.timeout(10), aclosing(iterator):
        async for change in iterator:
            found.append(change)
            if len(found) == count:
                break
    return found


async def test_a_key_reads_back_as_written_and_is_gone_after_its_deletion(store):
    assert await store.get("a") is None
    revision = await store.commit([Write("a", b"1")])
    entry = await store.get("a")
    assert (entry.value, entry.revision) == (b"1", revision)
    await store.commit([Write("a", None)])
    assert await store.get("a") is None


async def test_a_list_holds_the_prefix_alone_in_key_order_with_the_present_revision(store):
    revision = await store.commit([Write("m/b", b"2"), Write("m/a", b"1"), Write("n/a", b"3")])
    entries, at = await store.list("m/")
    assert [e.key for e in entries] == ["m/a", "m/b"]
    assert at == revision


async def test_each_write_of_a_commit_has_a_revision_of_its_own(store):
    last = await store.commit([Write("a", b"1"), Write("b", b"2")])
    assert ((await store.get("a")).revision, (await store.get("b")).revision) == (last - 1, last)


async def test_a_commit_whose_expectation_fails_changes_nothing_at_all(store):
    revision = await store.commit([Write("a", b"1")])
    for expect in ({"a": revision + 1}, {"a": ABSENT}, {"a": revision, "b": 7}):
        with pytest.raises(Conflict):
            await store.commit([Write("b", b"x"), Write("a", b"2")], expect=expect)
    assert (await store.get("a")).value == b"1"
    assert await store.get("b") is None
    assert (await store.list(""))[1] == revision


async def test_of_two_writers_that_expect_the_same_revision_one_wins(store):
    revision = await store.commit([Write("a", b"0")])
    results = await asyncio.gather(
        *(store.commit([Write("a", str(n).encode())], expect={"a": revision}) for n in range(8)),
        return_exceptions=True,
    )
    assert sum(isinstance(r, int) for r in results) == 1
    assert sum(isinstance(r, Conflict) for r in results) == 7


async def test_a_watch_sees_each_change_once_in_order_from_its_revision_on(store):
    start = await store.commit([Write("w/a", b"1")])
    await store.commit([Write("w/b", b"2"), Write("x/a", b"no"), Write("w/a", None)])
    changes = await take(store.watch("w/", start), 2)
    assert changes == [Change("w/b", b"2", start + 1), Change("w/a", None, start + 3)]
    assert await take(store.watch("w/", changes[0].revision), 1) == changes[1:]


async def test_a_watch_that_waits_wakes_for_a_later_commit(store):
    (_, start) = await store.list("")
    waiting = asyncio.create_task(take(store.watch("", start), 3))
    for n in range(3):
        await store.commit([Write("k", str(n).encode())])
    assert [c.value for c in await waiting] == [b"0", b"1", b"2"]


async def test_a_watch_from_a_compacted_or_a_future_revision_says_too_old(store):
    for n in range(5):
        revision = await store.commit([Write("k", str(n).encode())])
    await store.compact(revision - 1)
    assert (await store.get("k")).value == b"4"
    for wrong in (revision - 2, revision + 1):
        with pytest.raises(TooOld):
            await take(store.watch("", wrong), 1)
    assert [c.revision for c in await take(store.watch("", revision - 1), 1)] == [revision]


async def test_a_lease_has_one_holder_until_it_expires_and_every_acquisition_has_a_higher_epoch(store, later):
    first = await store.acquire("lead", "a", 10)
    with pytest.raises(Conflict, match="held by a"):
        await store.acquire("lead", "b", 10)
    later(9)
    first = await store.renew(first, 10)
    later(9)
    with pytest.raises(Conflict):
        await store.acquire("lead", "b", 10)
    later(2)
    second = await store.acquire("lead", "b", 10)
    assert second.epoch > first.epoch
    with pytest.raises(Fenced):
        await store.renew(first, 10)


async def test_a_commit_under_a_lease_that_is_over_is_fenced_and_changes_nothing(store):
    old = await store.acquire("lead", "a", 10)
    new = await store.acquire("lead", "a", 10)
    with pytest.raises(Fenced):
        await store.commit([Write("a", b"1")], fence=old)
    assert await store.get("a") is None
    await store.commit([Write("a", b"2")], fence=new)


async def test_a_released_lease_is_free_at_once_and_its_epoch_is_never_given_again(store):
    first = await store.acquire("lead", "a", 1000)
    await store.release(first)
    second = await store.acquire("lead", "b", 1000, above_epoch=41)
    assert second.epoch == 42
    await store.release(first)
    assert (await store.renew(second, 1)).holder == "b"


async def test_an_acknowledged_commit_is_there_for_the_next_process(store, opened):
    revision = await store.commit([Write("a", b"1")])
    await store.close()
    again = await opened()
    assert (await again.get("a")).revision == revision
    await again.close()


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_the_embedded_store_is_open_in_one_process_at_a_time(store, opened):
    with pytest.raises(Conflict, match="another process"):
        await opened()


@pytest.mark.parametrize("kind", ["redis"])
async def test_two_processes_share_one_store_of_a_cluster(store, opened):
    other = await opened()
    (_, start) = await store.list("")
    waiting = asyncio.create_task(take(store.watch("", start), 1))
    revision = await other.commit([Write("a", b"1")], expect={"a": ABSENT})
    assert await waiting == [Change("a", b"1", revision)]
    with pytest.raises(Conflict):
        await store.commit([Write("a", b"2")], expect={"a": ABSENT})
    await other.close()


async def test_a_closed_store_ends_its_watches_and_answers_unavailable(store):
    (_, start) = await store.list("")
    waiting = asyncio.create_task(take(store.watch("", start), 1))
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), 10)
    with pytest.raises(Unavailable):
        await store.get("a")


@pytest.mark.parametrize("kind", ["faulty-sqlite", "faulty-redis"])
async def test_a_commit_reported_failed_can_be_settled_by_reading(store):
    store.faults = ["failed", "lost-reply"]
    with pytest.raises(Unavailable):
        await store.commit([Write("a", b"1")], expect={"a": ABSENT})
    assert await store.get("a") is None
    with pytest.raises(Unavailable):
        await store.commit([Write("a", b"1")], expect={"a": ABSENT})
    assert (await store.get("a")).value == b"1"
    with pytest.raises(Conflict):
        await store.commit([Write("a", b"1")], expect={"a": ABSENT})
