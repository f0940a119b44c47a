"""Where the driver's errors end and the project's begin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from shared.errors import LanesLost, QueueFull, QueueUnavailable, TransitionFailed


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turn the driver's errors into the project's, once, at the border."""
    try:
        yield
    except OutOfMemoryError as error:
        raise QueueFull("The queue's memory is full. Try again later.") from error
    except ResponseError as error:
        text = str(error)
        if "NOGROUP" in text:
            raise LanesLost from error
        # A server's own refusals begin with a code in capitals: READONLY, LOADING, MISCONF...
        if "@user_script" in text and not text.split(maxsplit=1)[0].isupper():
            raise TransitionFailed(f"A step in the queue failed: {text}") from error
        raise QueueUnavailable from error
    except (RedisError, OSError, TimeoutError) as error:
        raise QueueUnavailable from error
    except RuntimeError as error:
        # uvloop's word for a connection that was lost a moment ago and that the driver didn't miss.
        if "closed" not in str(error):
            raise
        raise QueueUnavailable from error
