"""Runs a call in a forked process and measures what it used, so that a test can bound memory and survive a crash."""

import gc
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from fastar_nodes.errors import UserError
from timeouts import forked

MEMORY = 64 << 20  # bytes beyond the size of the file and what a valid file takes
CPU_LIMIT = 20  # seconds after which the process is killed
_WAIT_LIMIT = 120  # the same for a process that waits
_ADDRESS_SPACE = 4 << 30  # bytes beyond the parent's


@dataclass(frozen=True)
class Outcome:
    """What happened to a call.

    Attributes:
        kind: "ok", "refused" (a UserError), "traceback" (any other exception) or "died".
        message: of the exception, with its traceback unless it is a UserError.
        seconds: CPU time.
        memory: largest growth of the resident set, in bytes.
    """

    kind: str
    message: str
    seconds: float
    memory: int


def available() -> bool:
    """Whether this system can measure: it forks and has Linux's /proc."""
    return hasattr(os, "fork") and os.path.exists("/proc/self/clear_refs")


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":")) << 10


def _work(call: Callable[[], object]) -> list:
    forked(_WAIT_LIMIT)
    limit = _status("VmSize") + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    before, begin = _status("VmRSS"), resource.getrusage(resource.RUSAGE_SELF)
    kind, message = "ok", ""
    try:
        call()
    except UserError as e:
        kind, message = "refused", str(e)
    except BaseException:
        kind, message = "traceback", traceback.format_exc()[-3000:]
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - begin.ru_utime - begin.ru_stime
    return [kind, message, seconds, _status("VmHWM") - before]


def measure(call: Callable[[], object]) -> Outcome:
    """Run ``call`` in a child process. Its standard error is discarded: libraries in Rust print panics there."""
    sys.stdout.flush()
    gc.freeze()  # so that a collection in the child does not copy the parent's pages
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
        code = 1
        try:
            text = json.dumps(_work(call))
            with os.fdopen(write, "w") as pipe:
                pipe.write(text)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text:
        return Outcome(*json.loads(text))
    how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status >> 8}"
    return Outcome("died", how, CPU_LIMIT if how == "SIGXCPU" else 0.0, 0)


def problem(outcome: Outcome, size: int, normal: Outcome) -> str:
    """What is wrong with an outcome for input of ``size`` bytes, given that of a valid file; "" if nothing is."""
    if outcome.kind in ("traceback", "died"):
        return f"{outcome.kind}: {outcome.message}"
    if outcome.memory > normal.memory + size + MEMORY:
        took = f"{outcome.memory >> 20} MB, a valid file {normal.memory >> 20} MB"
        return f"took {took}, for a file of {size >> 10} kB ({outcome.kind}: {outcome.message})"
    if outcome.kind == "refused" and ("\n" in outcome.message or len(outcome.message) > 400):
        return f"no single short sentence: {outcome.message}"
    return ""
