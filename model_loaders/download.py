"""One file from the Hugging Face Hub into a folder: resumable, checked, and quick to say why it cannot.

huggingface_hub is imported when a download starts, never before. It brings the addresses (``HF_ENDPOINT``), the token
(``HF_TOKEN``), the offline switch (``HF_HUB_OFFLINE``) and the transfer; what is added here is a partial file that
outlives an interruption, and a caller who is never blocked by the network.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..errors import UserError

CONNECT_SECONDS = 45.0  # one address may time out after the other; a person waits no longer than this in all
_TICK_SECONDS = 0.2
_SMALLEST = 0.9  # of the catalogue's approximate size
_CHUNK = 1 << 22
_BARS = "huggingface_hub.http_get"

T = TypeVar("T")


class _Failed(Exception):
    """The transfer's error, as ``__cause__``; kept apart from what a caller's progress function raises."""


def readable_size(count: int) -> str:
    """Bytes as a person reads them: 832 MB, 1.91 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def download(
    repo: str,
    file: str,
    to: Path,
    *,
    revision: str | None = None,
    size: int | None = None,
    sha256: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    field: str = "checkpoint",
) -> Path:
    """Download ``file`` of ``repo`` to ``to / file``.

    An interrupted download leaves a hidden ``.part`` file, and the next call goes on where it ended. The length and,
    where the catalogue or the server knows it, the sha256 are checked before the file gets its name.

    Args:
        to: folder; made when needed.
        revision: commit, or None for the newest.
        size: approximate bytes, or None; a much smaller file is refused.
        sha256: hex digest, or None.
        progress: see :func:`.hub.resolve`.
        field: what a person filled in to get here; messages begin with it.

    Raises:
        UserError: within a minute when there is no connection or the server refuses; the sentence says how to get the
            file by hand.
    """
    by_hand = f"get it from https://huggingface.co/{repo} and put it into {to}"
    try:
        import huggingface_hub as hub
        from filelock import FileLock, Timeout
        from huggingface_hub.constants import ENDPOINT
    except ImportError as e:
        raise UserError(f"{field}: {file} needs huggingface-hub to be downloaded; install that, or {by_hand}") from e
    tell = progress or (lambda done, total: None)
    try:
        to.mkdir(parents=True, exist_ok=True)
        with FileLock(to / f".{file}.lock", timeout=0):
            url = hub.hf_hub_url(repo, file, revision=revision)
            about = _attend(
                lambda: hub.get_hf_file_metadata(url, timeout=10), lambda: tell(0, size or 0), CONNECT_SECONDS
            )
            part = _part(to, file, about.etag, about.size)
            _check_offer(about.size, size, part)
            _transfer(url, part, file, about.size, progress)
            checksum = sha256 or (about.etag if re.fullmatch("[0-9a-f]{64}", about.etag or "") else None)
            _check_part(part, about.size, checksum, tell)
            os.replace(part, to / file)
    except Timeout as e:
        raise UserError(f"{field}: {file} is already being downloaded to {to}; wait for that to end") from e
    except _Failed as e:
        reason = _reason(e.__cause__ or e)
        raise UserError(f"{field}: {file} could not be downloaded from {ENDPOINT}/{repo} ({reason}); {by_hand}") from e
    except OSError as e:
        if e.filename is None:  # not about a file of ours: what ``progress`` raised
            raise
        raise UserError(f"{field}: {file} could not be written to {to} ({e.strerror}); {by_hand}") from e
    return to / file


def _attend(call: Callable[[], T], tick: Callable[[], None], limit: float | None = None) -> T:
    """Run ``call`` in a thread of its own, and ``tick`` in this one until it has ended.

    Raises:
        _Failed: ``call`` raised, or took longer than ``limit`` seconds. Whatever ``tick`` raises passes unchanged.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as e:  # noqa: B036  handed over, not swallowed
            outcome.append((None, e))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begin = time.monotonic()
    while thread.is_alive():
        thread.join(_TICK_SECONDS)
        tick()
        if limit is not None and thread.is_alive() and time.monotonic() - begin > limit:
            raise _Failed from TimeoutError(f"no answer within {limit:.0f} seconds")
    result, error = outcome[0]
    if error is not None:
        raise _Failed from error
    return result  # type: ignore[return-value]


def _check_offer(offered: int | None, expected: int | None, part: Path) -> None:
    if offered and expected and offered < _SMALLEST * expected:
        raise _Failed from ValueError(f"the server offers {offered} bytes instead of about {expected}")
    free = shutil.disk_usage(part.parent).free
    needed = (offered or 0) - (part.stat().st_size if part.exists() else 0)
    if needed > free:
        raise _Failed from ValueError(f"it needs {readable_size(needed)} and the disk has {readable_size(free)} free")


def _part(to: Path, file: str, etag: str | None, size: int | None) -> Path:
    """The partial file of exactly this version; partial files of others are removed."""
    part = to / f".{file}.{re.sub('[^0-9A-Za-z]', '', etag or '')[:16] or 'unknown'}.part"
    for other in to.glob(f".{file}.*.part"):
        if other != part or not etag or (size and other.stat().st_size > size):
            other.unlink()
    return part


def _transfer(url: str, part: Path, name: str, size: int | None, progress: Callable[[int, int], None] | None) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    # Unbuffered, so that its length tells how far the transfer has come.
    with part.open("ab", buffering=0) as file, _quiet(progress is not None):
        start = file.tell()

        def tick() -> None:
            if progress is not None:
                progress(os.fstat(file.fileno()).st_size, size or 0)

        # Ending early closes the file, and a thread still waiting for the network ends at its next write.
        _attend(
            lambda: http_get(
                url, file, resume_size=start, headers=build_hf_headers(), expected_size=size, displayed_filename=name
            ),
            tick,
        )


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """Without huggingface_hub's own progress bar, where the caller shows one."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    wanted = wanted and not are_progress_bars_disabled(_BARS)
    if wanted:
        disable_progress_bars(_BARS)
    try:
        yield
    finally:
        if wanted:
            enable_progress_bars(_BARS)


def _check_part(part: Path, size: int | None, sha256: str | None, tell: Callable[[int, int], None]) -> None:
    actual = part.stat().st_size
    tell(actual, actual)
    digest = hashlib.sha256()
    if sha256:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                tell(actual, actual)
    if (size and actual != size) or (sha256 and digest.hexdigest() != sha256):
        part.unlink()
        raise _Failed from ValueError("what arrived is not the file that was announced")


def _reason(error: BaseException) -> str:
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE is set"
    if status in (401, 403):
        return f"the server refused with status {status}; a token in HF_TOKEN may help"
    if status is not None:
        return f"the server answered with status {status}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:160].rstrip(".")
    return f"no connection: {text}" if "Connect" in kinds or "Timeout" in kinds else text
