"""Work in several threads: NumPy's operations on large arrays do not hold Python's lock."""

import contextvars
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def mapped(function: Callable[[Any], Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
    """What a function makes of items, in order; threads are a few items ahead of who reads."""
    if threads == 1:
        yield from map(function, items)
        return
    pool, ahead = ThreadPoolExecutor(threads), deque[Future[Any]]()
    try:
        for item in items:
            # NumPy keeps what is done about errors with the context.
            ahead.append(pool.submit(contextvars.copy_context().run, function, item))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
