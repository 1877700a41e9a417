"""Marks of the shards that are being drawn, so that two processes on one folder do not draw the same one.

A mark is a file with a counter that its process raises every few seconds. It is void when its process has ended on this machine, or
when the counter has not changed for a while by the reader's own monotonic clock: clocks of different machines are never compared.
A void mark costs a shard that is drawn twice at worst; both writers write the same bytes.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from types import TracebackType
from typing import Any

from .folder import Folder, host

FOLDER = "claims"
# Seconds between two beats, and without one before a mark is void.
BEAT, STALE = 5.0, 30.0


class Claims:
    """Marks of this process. Use as a context manager; all marks are released at its end.

    Args:
        folder: of the sweep.
        beat, stale: seconds, see above.
    """

    def __init__(self, folder: Folder, beat: float = BEAT, stale: float = STALE):
        self.folder, self.beat, self.stale = folder, beat, stale
        self._me = {"process": uuid.uuid4().hex, "pid": os.getpid(), "host": host()}
        self._taken: dict[str, int] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beats, name="fastar-claims", daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        for name in list(self._taken):
            self.release(name)

    def take(self, name: str) -> bool:
        """Mark a shard; whether it is now this process's."""
        path, mine = f"{FOLDER}/{name}.json", self._mark(0)
        if not self.folder.create(path, mine):
            found = self.folder.read(path)
            if found is not None and not self._void(name, found):
                return False
            self.folder.write(path, mine)
        if self.folder.read(path) != mine:  # another process was faster
            return False
        with self._lock:
            self._taken[name] = 0
        return True

    def release(self, name: str) -> None:
        """Remove a mark of this process."""
        with self._lock:
            if self._taken.pop(name, None) is not None:
                self.folder.remove(f"{FOLDER}/{name}.json")

    def _mark(self, count: int) -> bytes:
        return json.dumps({**self._me, "beat": count}).encode()

    def _void(self, name: str, found: bytes) -> bool:
        """Whether a mark's process has ended."""
        try:
            about: Any = json.loads(found)
            pid, where, process = int(about["pid"]), about["host"], about["process"]
            if where == self._me["host"] and process != self._me["process"] and not _alive(pid):
                return True
        except (ValueError, KeyError, TypeError):
            pass  # damaged, or not written to its end yet
        before = self._seen.get(name)
        if before is None or before[0] != found:
            self._seen[name] = (found, time.monotonic())
            return False
        return time.monotonic() - before[1] > self.stale

    def _beats(self) -> None:
        """Raise the counters of all marks until the end."""
        while not self._end.wait(self.beat):
            with self._lock:
                for name in self._taken:
                    self._taken[name] += 1
                    try:
                        self.folder.write(f"{FOLDER}/{name}.json", self._mark(self._taken[name]))
                    except (OSError, ValueError):
                        pass  # the drawing itself reports a full disk or a lost connection


def _alive(pid: int) -> bool:
    """Whether a process of this machine, other than this one, exists. Elsewhere than on POSIX it cannot be asked without harm."""
    if pid == os.getpid():
        return False  # an earlier process had this number, as the first one of a container always has
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
