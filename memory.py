"""Insufficient memory: recognising it, working in smaller chunks, and saying so.

Every package may import this module.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .errors import UserError

# What backends call insufficient memory. Their exceptions have different classes. The last four are
# comfy-aimdo's: two of the device, two of pinned memory.
_WORDS = (
    "out of memory",
    "allocate memory",
    "not enough memory",
    "alloc_failed",
    "bad_alloc",
    "vram grow failed",
    "vram reservation failed",
    "hostbuffer allocation failed",
    "hostbuffer.extend failed",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch, NumPy or Python reports insufficient memory, of a device or of the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, RuntimeError):
        return False

    message = str(error).lower()
    return any(words in message for words in _WORDS)


@contextmanager
def enough_memory(sentence: str) -> Iterator[None]:
    """Run a block; if memory is insufficient, raise a :class:`UserError` with ``sentence``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(sentence) from None


def in_chunks(work: Callable[[Any], Any], x: Any, size: int, release: Callable[[], None]) -> list[Any]:
    """Results of ``work`` for consecutive chunks of a tensor.

    If memory is insufficient, the chunks are halved; if it is insufficient for one row, the exception of ``work`` is
    raised. ``release`` is called before a chunk is repeated.
    """
    out: list[Any] = []
    done = 0
    while done < len(x):
        try:
            out.append(work(x[done : done + size]))
            done += size
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or size == 1:
                raise

        # Outside of the handler, because the exception holds tensors.
        release()
        size = (min(size, len(x)) + 1) // 2

    return out
