"""Work that can be counted, for tests of what must end soon: seconds depend on the machine, statements do not."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def statements(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes, in every function that it enters. What is done within C
    counts as one line.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
