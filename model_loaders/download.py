"""Resumable, verified download of one file from the Hugging Face Hub.

huggingface_hub is imported when a download starts. It handles the endpoint (``HF_ENDPOINT``), the token (``HF_TOKEN``), the
offline switch (``HF_HUB_OFFLINE``) and the transfer. This module adds a partial file that survives an interruption, and runs
network calls in a thread, so that the caller can report progress and cancel at any time.
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

from ..errors import UserError, first_line

CONNECT_SECONDS = 45.0  # total time to connect; each address of a host can time out in turn
_TICK_SECONDS = 0.2
_MIN_SIZE_RATIO = 0.9  # offered size over the catalogue's approximate size
_CHUNK = 1 << 22
_BARS = "huggingface_hub.http_get"

T = TypeVar("T")


class _Failed(Exception):
    """A failed transfer, with the error as ``__cause__``; distinguishes it from exceptions of the progress function."""


def readable_size(count: int) -> str:
    """Format bytes in decimal units: 832 MB, 1.91 GB."""
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

    An interrupted download leaves a hidden ``.part`` file, and the next call resumes it. The length and, if the catalogue
    or the server provides it, the sha256 are verified before the file is renamed.

    Args:
        to: target folder; created if necessary.
        revision: commit, or None for the newest.
        size: approximate size in bytes, or None; a file below 90 % of it is refused.
        sha256: hex digest, or None.
        progress: see :func:`.hub.resolve`.
        field: name of the input, for messages.

    Returns:
        Path of the downloaded file.

    Raises:
        UserError: no connection (within a minute), a refusal by the server, a full disk, or a corrupted file; the message
            gives the address for a manual download.
    """
    by_hand = f"get it from https://huggingface.co/{repo} and put it into {to}"
    try:
        import huggingface_hub as hub
        from filelock import FileLock, Timeout
        from huggingface_hub.constants import ENDPOINT
    except ImportError as e:
        raise UserError(f"{field}: {file} needs huggingface-hub to be downloaded; install that, or {by_hand}") from e
    report = progress or (lambda done, total: None)
    try:
        to.mkdir(parents=True, exist_ok=True)
        with FileLock(to / f".{file}.lock", timeout=0):
            url = hub.hf_hub_url(repo, file, revision=revision)
            metadata = _run_in_thread(
                lambda: hub.get_hf_file_metadata(url, timeout=10), lambda: report(0, size or 0), CONNECT_SECONDS
            )
            part = _part(to, file, metadata.etag, metadata.size)
            _check_offer(metadata.size, size, part)
            _transfer(url, part, file, metadata.size, progress)
            checksum = sha256 or (metadata.etag if re.fullmatch("[0-9a-f]{64}", metadata.etag or "") else None)
            _check_part(part, metadata.size, checksum, report)
            os.replace(part, to / file)
    except Timeout as e:
        raise UserError(f"{field}: {file} is already being downloaded to {to}; wait for that to end") from e
    except _Failed as e:
        reason = _reason(e.__cause__ or e)
        raise UserError(f"{field}: {file} could not be downloaded from {ENDPOINT}/{repo} ({reason}); {by_hand}") from e
    except OSError as e:
        if e.filename is None:  # raised by ``progress``, not by file access
            raise
        raise UserError(f"{field}: {file} could not be written to {to} ({e.strerror}); {by_hand}") from e
    return to / file


def _run_in_thread(call: Callable[[], T], tick: Callable[[], None], limit: float | None = None) -> T:
    """Run ``call`` in a thread, and ``tick`` in the calling thread every 0.2 seconds until it ends.

    Raises:
        _Failed: ``call`` raised, or took longer than ``limit`` seconds. Exceptions of ``tick`` propagate unchanged.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as e:  # noqa: B036  re-raised in the calling thread
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
    """Check the offered size against the catalogue and the free disk space.

    Raises:
        _Failed: it is too small, or does not fit on the disk.
    """
    if offered and expected and offered < _MIN_SIZE_RATIO * expected:
        raise _Failed from ValueError(f"the server offers {offered} bytes instead of about {expected}")
    free = shutil.disk_usage(part.parent).free
    needed = (offered or 0) - (part.stat().st_size if part.exists() else 0)
    if needed > free:
        raise _Failed from ValueError(f"it needs {readable_size(needed)} and the disk has {readable_size(free)} free")


def _part(to: Path, file: str, etag: str | None, size: int | None) -> Path:
    """Path of the partial file of this version; partial files of other versions are deleted."""
    part = to / f".{file}.{re.sub('[^0-9A-Za-z]', '', etag or '')[:16] or 'unknown'}.part"
    for other in to.glob(f".{file}.*.part"):
        if other != part or not etag or (size and other.stat().st_size > size):
            other.unlink()
    return part


def _transfer(url: str, part: Path, name: str, size: int | None, progress: Callable[[int, int], None] | None) -> None:
    """Append the rest of the file to ``part``."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    # Unbuffered, so that the file size is the progress.
    with part.open("ab", buffering=0) as file, _quiet(progress is not None):
        start = file.tell()

        def tick() -> None:
            if progress is not None:
                progress(os.fstat(file.fileno()).st_size, size or 0)

        # If ``tick`` raises, the file is closed, and the thread ends at its next write.
        _run_in_thread(
            lambda: http_get(
                url, file, resume_size=start, headers=build_hf_headers(), expected_size=size, displayed_filename=name
            ),
            tick,
        )


@contextmanager
def _quiet(enabled: bool) -> Iterator[None]:
    """Disable huggingface_hub's progress bar if ``enabled``, because the caller shows one."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    enabled = enabled and not are_progress_bars_disabled(_BARS)
    if enabled:
        disable_progress_bars(_BARS)
    try:
        yield
    finally:
        if enabled:
            enable_progress_bars(_BARS)


def _check_part(part: Path, size: int | None, sha256: str | None, report: Callable[[int, int], None]) -> None:
    """Verify length and checksum; a file that fails is deleted.

    Raises:
        _Failed: it does not match.
    """
    actual = part.stat().st_size
    report(actual, actual)
    digest = hashlib.sha256()
    if sha256:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                report(actual, actual)
    if (size and actual != size) or (sha256 and digest.hexdigest() != sha256):
        part.unlink()
        raise _Failed from ValueError("what arrived is not the file that was announced")


def _reason(error: BaseException) -> str:
    """A failed transfer's cause, for the message."""
    # By class name, because huggingface_hub raises errors of requests or httpx, depending on its version.
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE is set; without it, HF_ENDPOINT may name a mirror"
    if status in (401, 403):
        return f"the server refused with status {status}; a token in HF_TOKEN may help"
    if status is not None:
        return f"the server answered with status {status}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    text = first_line(error).rstrip(".")
    return f"no connection, HF_ENDPOINT may name a mirror: {text}" if "Connect" in kinds or "Timeout" in kinds else text
