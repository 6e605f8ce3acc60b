"""What workers on Ray Train say of themselves, and what is known when they die."""

import asyncio

from concord.execution.channel import FAILED, LOST, Channel, Message, Sign

SIGN = Sign(0, "here", 7, ("north",))


def test_workers_that_died_are_told_once_and_are_no_longer_waited_for() -> None:
    async def story() -> None:
        channel = Channel(None)
        await channel.lose()  # no node has room for the first workers
        assert await channel.take(0) == []
        for restarts in range(2):
            assert (await channel.begin()).restarts == restarts
            await channel.hear(SIGN)
            assert [each.sign for each in await channel.waiting()] == [SIGN]
            await channel.lose()
            await channel.lose()  # nor for the new ones, yet
            assert await channel.waiting() == []
            assert await channel.take(1) == [Message(LOST, {})]

    asyncio.run(story())


def test_workers_that_end_since_the_run_has_failed_did_not_die() -> None:
    async def story() -> None:
        channel = Channel(None)
        await channel.begin()
        failed = Message(FAILED, {"error": None})
        assert await channel.send([failed])
        await channel.lose()
        assert await channel.take(1) == [failed]

    asyncio.run(story())
