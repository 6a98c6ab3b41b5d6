"""Many requests at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def run_workers(
    work: Callable[[Item], Awaitable[None]], items: Iterable[Item], count: int
) -> None:
    """Call `work` for every item, for `count` of them at the same time; the first error cancels
    the others and is raised.
    """
    waiting = iter(items)

    async def take_items() -> None:
        # The workers share this iterator, so each takes the next item.
        for item in waiting:
            await work(item)

    workers = [asyncio.create_task(take_items()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
