"""Who gets which slot, in what order, and what is found in it."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from loopd.model.client import ModelClient
from loopd.model.slots import SlotPool
from tests.model.conftest import Start
from tests.model.requests import assistant, ignore, left_by, request, user


async def say(pool: SlotPool, client: ModelClient, session: str, *texts: str, prefer: int | None = None) -> int | None:
    """Send one request of the session and return its slot."""
    async with pool.hold(session, prefer=prefer) as slot:
        await client.complete(request(*(user(text) for text in texts), slot=slot), ignore)
    return slot


async def test_a_session_stays_in_its_slot(start: Start) -> None:
    _, client = await start(slots=2)
    pool = SlotPool(2, client)
    slots = [await say(pool, client, session, "hi") for session in ("a", "b", "a", "b", "b", "a")]
    assert slots == [0, 1, 0, 1, 1, 0]


async def test_a_newcomer_gets_the_slot_that_was_unused_longest(start: Start) -> None:
    _, client = await start(slots=2)
    pool = SlotPool(2, client)
    assert [await say(pool, client, session, "hi") for session in ("a", "b", "a", "c", "d")] == [0, 1, 0, 1, 0]


async def test_the_slot_of_the_log_is_taken_unless_it_is_taken_or_gone(start: Start) -> None:
    _, client = await start(slots=3)
    pool = SlotPool(3, client)
    assert await say(pool, client, "a", "hi", prefer=2) == 2
    assert await say(pool, client, "b", "hi", prefer=2) == 0
    assert await say(pool, client, "c", "hi", prefer=7) == 1


async def test_others_wait_in_the_order_they_came_and_are_told_their_place(start: Start) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    order: list[str] = []
    places: dict[str, list[int]] = {"b": [], "c": []}

    async def turn(session: str) -> None:
        async with pool.hold(session, on_place=places[session].append):
            order.append(session)

    async with asyncio.TaskGroup() as group, pool.hold("a"):
        for session in ("b", "c"):
            group.create_task(turn(session))
            await asyncio.sleep(0)
        assert places == {"b": [1], "c": [2]}
    assert order == ["b", "c"]
    assert places == {"b": [1], "c": [2, 1]}


async def test_a_session_waits_for_its_own_slot_while_another_is_free(start: Start) -> None:
    _, client = await start(slots=2)
    pool = SlotPool(2, client)
    await say(pool, client, "a", "hi")
    async with AsyncExitStack() as stack:
        assert await stack.enter_async_context(pool.hold("a")) == 0
        waiting = asyncio.create_task(say(pool, client, "a", "hi"))
        assert await say(pool, client, "b", "hi") == 1
        assert not waiting.done()
        await stack.aclose()
        assert await waiting == 0


async def test_one_that_is_cancelled_in_the_queue_holds_nobody_up(start: Start) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool.hold("a"))
        waiting = [asyncio.create_task(say(pool, client, session, "hi")) for session in ("b", "c")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        await stack.aclose()
        assert await waiting[1] == 0
    assert waiting[0].cancelled()


async def test_one_that_is_cancelled_as_it_is_served_gives_the_slot_back(start: Start) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(pool.hold("a"))
        waiting = asyncio.create_task(say(pool, client, "b", "hi"))
        await asyncio.sleep(0)
        await stack.aclose()
        waiting.cancel()
        await asyncio.wait([waiting])
    assert await say(pool, client, "c", "hi") == 0


async def test_a_server_without_slots_is_not_queued_for(start: Start) -> None:
    _, client = await start(llama_cpp=False)
    pool = SlotPool(None, client)
    async with pool.hold("a") as first, pool.hold("b") as second:
        assert (first, second) == (None, None)
        assert (await pool.look(None, "a", 10)).kind == "unknown"


async def test_a_server_that_comes_back_with_other_slots_is_followed(start: Start) -> None:
    _, client = await start(slots=2)
    pool = SlotPool(2, client)
    await say(pool, client, "a", "hi")
    assert await say(pool, client, "b", "hi") == 1
    pool.resize(1)
    assert await say(pool, client, "b", "hi") == 0
    assert [slot["session"] for slot in pool.describe()] == ["b"]


async def test_those_who_wait_go_on_when_the_server_has_no_slots_any_more(start: Start) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    async with pool.hold("a"):
        waiting = asyncio.create_task(say(pool, client, "b", "hi"))
        await asyncio.sleep(0)
        pool.resize(None)
        assert await waiting is None


async def test_a_slot_that_was_never_used_is_cold(start: Start) -> None:
    _, client = await start()
    condition = await SlotPool(1, client).look(0, "a", 100)
    assert (condition.kind, condition.by) == ("cold", "")


@pytest.mark.parametrize("fresh", [False, True], ids=["same-pool", "after-a-restart-of-loopd"])
async def test_a_slot_is_ours_after_our_own_request(start: Start, *, fresh: bool) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    async with pool.hold("a") as slot:
        done = await client.complete(request(user("hi"), slot=slot), ignore)
    if fresh:
        pool = SlotPool(1, client)
    assert (await pool.look(0, "a", left_by(done))).kind == "ours"


async def test_a_slot_is_still_ours_after_a_cancel_and_after_holding_it_for_nothing(start: Start) -> None:
    server, client = await start({"text": "one"}, {"text": "two", "gate": "here"})
    pool = SlotPool(1, client)
    async with pool.hold("a") as slot:
        done = await client.complete(request(user("hi"), slot=slot), ignore)
    cancelled = asyncio.create_task(say(pool, client, "a", "hi", "there"))
    await server.gate("here").reached.wait()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    async with pool.hold("b"):
        pass
    condition = await pool.look(0, "a", server.slots[0].common([*server.slots[0].tokens, 0]))
    assert condition.kind == "ours"
    assert done.text == "one"


async def test_another_session_in_the_slot_is_named(start: Start) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    await say(pool, client, "a", "hi")
    await say(pool, client, "b", "hi")
    condition = await pool.look(0, "a", 5)
    assert (condition.kind, condition.by) == ("foreign", "b")


async def test_another_client_in_the_slot_is_seen(start: Start) -> None:
    _, client = await start()
    pool = SlotPool(1, client)
    await say(pool, client, "a", "hi")
    await client.complete(request(user("I am somebody else")), ignore)
    condition = await pool.look(0, "a", 5)
    assert (condition.kind, condition.by) == ("foreign", "")
    assert "another client's task 2" in condition.evidence


async def test_a_restarted_server_is_seen(start: Start) -> None:
    server, client = await start()
    pool = SlotPool(1, client)
    await say(pool, client, "a", "hi")
    await say(pool, client, "a", "hi", "there")
    server.restart()
    assert (await pool.look(0, "a", 5)).kind == "cold"
    await client.complete(request(user("hi")), ignore)
    condition = await pool.look(0, "a", 5)
    assert condition.kind == "cold"
    assert "started anew" in condition.evidence


async def test_a_slot_that_holds_less_than_was_left_is_not_ours(start: Start) -> None:
    server, client = await start()
    pool = SlotPool(1, client)
    async with pool.hold("a") as slot:
        done = await client.complete(request(user("hi"), assistant("yes"), user("no"), slot=slot), ignore)
    server.slots[0].forget(2)
    assert (await pool.look(0, "a", left_by(done))).kind == "foreign"
    server.slots[0].forget(1000)
    assert (await pool.look(0, "a", left_by(done))).kind == "cold"


async def test_a_server_that_has_died_does_not_keep_the_slot_from_being_given_back(start: Start) -> None:
    server, client = await start()
    pool = SlotPool(1, client)
    client.timeouts = type(client.timeouts)(connect_s=0.1)
    async with pool.hold("a"):
        await server.__aexit__()
    async with pool.hold("b") as slot:
        assert slot == 0
    await server.__aenter__()
