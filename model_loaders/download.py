"""Resumable, verified download of one file from the Hugging Face Hub.

huggingface_hub is imported when a download starts. It handles the endpoint (``HF_ENDPOINT``), the token (``HF_TOKEN``), the
offline switch (``HF_HUB_OFFLINE``), retries and the transfer.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line

_CHUNK = 1 << 22


class Missing(UserError):
    """The repository has no such file."""


class _Part(io.FileIO):
    """A partial file; ``report`` gets its size after every chunk (10 MB), and what it raises ends the transfer."""

    def __init__(self, path: Path, report: Callable[[int], None]):
        super().__init__(path, "ab")
        self.report = report

    def write(self, chunk: Any) -> int:
        count = super().write(chunk)
        self.report(self.tell())
        return count


def readable_size(count: float) -> str:
    """Format bytes in decimal units: 832 MB, 1.91 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def download(
    repo: str,
    file: str,
    to: Path,
    revision: str | None,
    sha256: str | None,
    progress: Callable[[int, int], None],
    field: str,
) -> None:
    """Download ``file`` of ``repo`` to ``to / file``.

    An interrupted download leaves a hidden ``.part`` file, and the next call resumes it. Before the file is renamed, its length is
    verified, and its sha256 against the catalogue's, and the server's, where it states one. ``progress``: see :func:`.hub.resolve`.

    Raises:
        Missing: the repository has no such file.
        UserError: no connection, a refusal by the server, a full disk, or a corrupted file; the message gives the address
            for a manual download.
    """
    by_hand = f"get it from https://huggingface.co/{repo} and put it into {to}"
    try:
        import huggingface_hub as hub
        from filelock import FileLock, Timeout

        # Not hf_hub_download: since version 1.18 it deletes the partial file of an interrupted download, and the versions that
        # transformers 4 accepts (below 1.0) report no progress. This function transfers by HTTP, also where hf_xet is installed.
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers
    except ImportError as e:
        raise UserError(f"{field}: {file} needs huggingface-hub to be downloaded; install that, or {by_hand}") from e
    cancelled: list[Exception] = []

    def report(done: int, total: int) -> None:
        try:
            progress(done, total)
        except Exception as e:
            cancelled.append(e)
            raise

    try:
        to.mkdir(parents=True, exist_ok=True)
        with FileLock(to / f".{file}.lock", timeout=0):
            # 1. Ask for the length and the digest.
            url, headers = hub.hf_hub_url(repo, file, revision=revision), build_hf_headers()
            offer = hub.get_hf_file_metadata(url, timeout=10)
            etag, size = offer.etag or "", offer.size or 0
            part = to / f".{file}.{re.sub('[^0-9A-Za-z]', '', etag)[:16] or 'unknown'}.part"
            for other in to.glob(f".{file}.*.part"):  # of other versions
                if other != part or not etag:
                    other.unlink()
            # 2. Append what is missing to the partial file.
            with _Part(part, lambda done: report(done, size)) as opened:
                begin, free = opened.tell(), shutil.disk_usage(to).free
                if size - begin > free:
                    raise ValueError(f"it needs {readable_size(size)} and {readable_size(free)} are free")
                http_get(url, opened, resume_size=begin, headers=headers, expected_size=size or None)
            # 3. Verify and rename.
            digest = hashlib.sha256()
            with part.open("rb") as arrived:
                while chunk := arrived.read(_CHUNK):
                    digest.update(chunk)
                    report(size, size)
            expected, found = [sha256, etag if re.fullmatch("[0-9a-f]{64}", etag) else None], digest.hexdigest()
            if size and part.stat().st_size != size or any(stated not in (None, found) for stated in expected):
                part.unlink()
                raise ValueError(f"what arrived has another length or sha256 ({found[:16]}...)")
            os.replace(part, to / file)
            logging.getLogger(__name__).info("%s: sha256 %s", file, found)
    except Timeout as e:
        raise UserError(f"{field}: {file} is already being downloaded to {to}; wait for that to end") from e
    except Exception as e:  # huggingface_hub's depend on its version
        if e in cancelled:
            raise
        status = getattr(getattr(e, "response", None), "status_code", None)
        kind = Missing if status == 404 else UserError
        raise kind(f"{field}: {file} could not be downloaded ({_reason(e, status)}); {by_hand}") from e


def _reason(error: Exception, status: int | None) -> str:
    """A failed transfer's cause, for the message."""
    if status is not None:
        return f"status {status}{': a token in HF_TOKEN may help' if status in (401, 403) else ''}"
    if isinstance(error, OSError) and error.strerror:  # of the file system
        return error.strerror
    return f"{first_line(error).rstrip('.')}; HF_ENDPOINT may name a mirror, and HF_HUB_OFFLINE must not be set"
