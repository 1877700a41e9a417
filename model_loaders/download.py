"""Resumable, verified download of one file from the Hugging Face Hub.

huggingface_hub is imported when a download starts. It handles the endpoint (``HF_ENDPOINT``), the token (``HF_TOKEN``), the
offline switch (``HF_HUB_OFFLINE``) and the transfer. Its ``hf_hub_download`` is not used: since 2.x it discards a partial
file, and before 1.3, which transformers 4 requires, it cannot report progress.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
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
) -> Path:
    """Download ``file`` of ``repo`` to ``to / file``.

    An interrupted download leaves a hidden ``.part`` file, and the next call resumes it. Before the file is renamed, its
    length is verified, and its sha256 against the catalogue's, the one recorded at the first download, and the server's,
    where it states one. The sha256 is then recorded, see :func:`check_digest`.

    Args:
        to: target folder; created if necessary.
        revision: commit, or None for the newest.
        sha256: hex digest, or None.
        progress: see :func:`.hub.resolve`.
        field: name of the input, for messages.

    Returns:
        Path of the downloaded file.

    Raises:
        Missing: the repository has no such file.
        UserError: no connection, a refusal by the server, a full disk, or a corrupted file; the message gives the address
            for a manual download. Also a ``file`` that is no plain file name.
    """
    if file in ("", "..") or PureWindowsPath(file).name != file or "\0" in file or ":" in file:
        raise UserError(f"{field}: {file[:80]!a} is no plain file name, so it is not downloaded; install FastAR again")
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
            url, headers = hub.hf_hub_url(repo, file, revision=revision), build_hf_headers()
            offer = _in_thread(lambda: hub.get_hf_file_metadata(url, timeout=10), lambda: report(0, 0))
            etag, size = offer.etag or "", offer.size or 0
            part = to / f".{file}.{re.sub('[^0-9A-Za-z]', '', etag)[:16] or 'unknown'}.part"
            for other in to.glob(f".{file}.*.part"):  # of other versions
                if other != part or not etag:
                    other.unlink()
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
            found = _sha256(part, lambda: report(size, size))
            expected = [sha256, recorded(to / file), etag if re.fullmatch("[0-9a-f]{64}", etag) else None]
            if size and part.stat().st_size != size or any(digest not in (None, found) for digest in expected):
                part.unlink()
                raise _Failed from ValueError(f"what arrived has another length or sha256 ({found[:16]}...)")
            os.replace(part, to / file)
            _record(to / file, found)
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
    return to / file


def _in_thread(call: Callable[[], T], tick: Callable[[], None]) -> T:
    """Run ``call`` in a thread, and ``tick`` in the calling thread every 0.2 seconds until it ends.

    Raises:
        _Failed: ``call`` raised. Exceptions of ``tick`` propagate unchanged.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as e:  # noqa: B036  re-raised in the calling thread
            errors.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_SECONDS)
        tick()
    if errors:
        raise _Failed from errors[0]
    return results[0]


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
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the disk is full"
    if status is not None:
        return f"status {status}{': a token in HF_TOKEN may help' if status in (401, 403) else ''}"
    return f"{first_line(error).rstrip('.')}; HF_ENDPOINT may name a mirror"


# ------------------------------------------------------------------------------------------------ digests


def check_digest(path: Path, pinned: str | None, field: str, tick: Callable[[], None] = lambda: None) -> None:
    """Check a downloaded file against its sha256: the catalogue's, or the one recorded at the first download.

    Beside ``NAME`` the file ``NAME.sha256`` holds a line in the format of ``sha256sum``. Hashing 12 GB takes half a minute,
    so a file is hashed again only after it changed, which its modification time shows.

    Args:
        pinned: sha256 of the catalogue, or None.
        field: name of the input, for messages.
        tick: called every 4 MB.

    Raises:
        UserError: the digest differs.
    """
    first = recorded(path)
    expected = pinned or first
    try:
        if expected is None or first == expected and path.stat().st_mtime <= _beside(path).stat().st_mtime:
            return
        found = _sha256(path, tick)
        if found == expected:
            return _record(path, found)
    except OSError:  # a read-only folder
        return
    raise UserError(
        f"{field}: {path.name} has the sha256 {found[:16]}... instead of {expected[:16]}...; delete it to download it again"
        f"{'' if pinned else f', or {path.name}.sha256 to accept it'}"
    )


def recorded(path: Path) -> str | None:
    """The sha256 recorded for a file, or None."""
    try:
        found = re.match("[0-9a-f]{64}", _beside(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[0] if found else None


def _record(path: Path, sha256: str) -> None:
    """Record the sha256 of a file."""
    _beside(path).write_text(f"{sha256}  {path.name}\n", encoding="utf-8")


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _sha256(path: Path, tick: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            tick()
    return digest.hexdigest()
