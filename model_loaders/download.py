"""Resumable, verified download of one file from the Hugging Face Hub.

huggingface_hub is imported when a download starts. It handles the endpoint (``HF_ENDPOINT``), the token (``HF_TOKEN``), the
offline switch (``HF_HUB_OFFLINE``) and the transfer. Its ``hf_hub_download`` is not used: since 2.x it discards a partial
file, and before 1.3, which transformers 4 requires, it cannot report progress.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..errors import UserError, first_line

_TICK_SECONDS = 0.2
_CHUNK = 1 << 22
_BAR = "huggingface_hub.http_get"

T = TypeVar("T")


class Missing(UserError):
    """The repository has no such file."""


class _Failed(Exception):
    """A failed transfer, with the error as ``__cause__``; distinguishes it from exceptions of the progress function."""


def readable_size(count: float) -> str:
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
    sha256: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    field: str = "checkpoint",
) -> None:
    """Download ``file`` of ``repo`` to ``to / file``.

    An interrupted download leaves a hidden ``.part`` file, and the next call resumes it. Before the file is renamed, its length is
    verified, and its sha256 against the catalogue's, and the server's, where it states one. ``progress``: see :func:`.hub.resolve`;
    None shows huggingface_hub's progress bar.

    Raises:
        Missing: the repository has no such file.
        UserError: no connection, a refusal by the server, a full disk, or a corrupted file; the message gives the address
            for a manual download.
    """
    by_hand = f"get it from https://huggingface.co/{repo} and put it into {to}"
    try:
        import huggingface_hub as hub
        from filelock import FileLock, Timeout
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers
    except ImportError as e:
        raise UserError(f"{field}: {file} needs huggingface-hub to be downloaded; install that, or {by_hand}") from e
    report = progress or (lambda done, total: None)
    try:
        to.mkdir(parents=True, exist_ok=True)
        with FileLock(to / f".{file}.lock", timeout=0):
            # 1. Ask for the length and the digest.
            url, headers = hub.hf_hub_url(repo, file, revision=revision), build_hf_headers()
            offer = _in_thread(lambda: hub.get_hf_file_metadata(url, timeout=10), lambda: report(0, 0))
            etag, size = offer.etag or "", offer.size or 0
            part = to / f".{file}.{re.sub('[^0-9A-Za-z]', '', etag)[:16] or 'unknown'}.part"
            for other in to.glob(f".{file}.*.part"):  # of other versions
                if other != part or not etag:
                    other.unlink()
            # 2. Append what is missing to the partial file.
            with part.open("ab", buffering=0) as opened:  # unbuffered, so that the file's size is the progress
                begin = opened.tell()
                if size - begin > (free := shutil.disk_usage(to).free):
                    raise _Failed from ValueError(f"it needs {readable_size(size)} and {readable_size(free)} are free")
                # Where ``report`` raises, the file is closed, and the thread ends at its next write.
                with _without_bar(progress is not None):
                    _in_thread(
                        lambda: http_get(url, opened, resume_size=begin, headers=headers, expected_size=size or None),
                        lambda: report(os.fstat(opened.fileno()).st_size, size),
                    )
            # 3. Verify and rename.
            found = _sha256(part, lambda: report(size, size))
            expected = [sha256, etag if re.fullmatch("[0-9a-f]{64}", etag) else None]
            if size and part.stat().st_size != size or any(digest not in (None, found) for digest in expected):
                part.unlink()
                raise _Failed from ValueError(f"what arrived has another length or sha256 ({found[:16]}...)")
            os.replace(part, to / file)
            logging.getLogger(__name__).info("%s: sha256 %s", file, found)
    except Timeout as e:
        raise UserError(f"{field}: {file} is already being downloaded to {to}; wait for that to end") from e
    except _Failed as e:
        status = getattr(getattr(e.__cause__, "response", None), "status_code", None)
        kind = Missing if status == 404 else UserError
        raise kind(f"{field}: {file} could not be downloaded ({_reason(e.__cause__ or e, status)}); {by_hand}") from e
    except OSError as e:
        if e.filename is None:  # raised by ``progress``, not by file access
            raise
        raise UserError(f"{field}: {file} could not be written to {to} ({e.strerror}); {by_hand}") from e


def _in_thread(call: Callable[[], T], tick: Callable[[], None]) -> T:
    """Run ``call`` in a thread, and ``tick`` in the calling thread every 0.2 seconds until it ends; a :class:`_Failed` if it raised."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as e:  # noqa: B036  re-raised in the calling thread
            future.set_exception(e)

    threading.Thread(target=work, daemon=True).start()
    while not wait([future], _TICK_SECONDS).done:
        tick()
    if error := future.exception():
        raise _Failed from error
    return future.result()


@contextmanager
def _without_bar(enabled: bool) -> Iterator[None]:
    """Hide huggingface_hub's progress bar if ``enabled``, because the caller shows one."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    enabled = enabled and not are_progress_bars_disabled(_BAR)
    if enabled:
        disable_progress_bars(_BAR)
    try:
        yield
    finally:
        if enabled:
            enable_progress_bars(_BAR)


def _reason(error: BaseException, status: int | None) -> str:
    """A failed transfer's cause, for the message."""
    if status is not None:
        return f"status {status}{': a token in HF_TOKEN may help' if status in (401, 403) else ''}"
    if isinstance(error, OSError) and error.strerror:  # a full disk
        return error.strerror
    return f"{first_line(error).rstrip('.')}; HF_ENDPOINT may name a mirror, and HF_HUB_OFFLINE must not be set"


def _sha256(path: Path, tick: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            tick()
    return digest.hexdigest()
