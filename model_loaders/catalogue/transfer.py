"""Files of the Hugging Face Hub: those in its cache on this computer, and downloads, the package's only network access.

huggingface-hub does the work: cache, addresses, token, requests, retries, and the bar on a terminal. :func:`_append` is
the only function that calls what it does not document. Its public hf_hub_download is not used: before 1.0 it reports no
progress and cannot be cancelled, version 2.4 deletes what has arrived when a download is cancelled or fails, and with
hf-xet it ignores what a progress bar raises.

What is ours: a file gets its name only when its sha256 is right, a download can be cancelled after every chunk, the
next one resumes it, and what failed is one sentence. A chunk is 10 MB, which are lost if the connection ends within it;
where a server is silent, cancelling waits for the library's timeouts, about a minute in all.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import UserError, first_line
from ..files.formats import printable

# Called with (bytes that are here, bytes in all or 0) after every chunk; what it raises cancels the download.
Report = Callable[[int, int], None]

_SHA256 = re.compile("[0-9a-f]{64}")
_BLOCK = 1 << 22  # bytes that are hashed or copied at once
# The factor by which a file may exceed the catalogue's size, which may be that of the weights alone.
_ABOUT = 1.05
# In the name of a partial file whose content the server does not identify, so that it cannot be continued.
_UNKNOWN = "unknown"


class Missing(UserError):
    """The repository has no such file."""


class _Failed(Exception):
    """A download has failed. The message is the cause and what helps."""


class _Stopped(BaseException):
    """Carries what the caller's ``report`` raised past all handlers of the libraries."""


@dataclass(frozen=True)
class Remote:
    """A file of a repository, as the catalogue knows it."""

    repo: str
    name: str
    revision: str | None  # None takes the newest
    sha256: str | None  # None if it is not pinned
    size: int | None  # about, in bytes; None if it is not known


def readable_size(count: float) -> str:
    """Format bytes in decimal units: 832 MB, 1.91 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    if count >= 1e6:
        return f"{count / 1e6:.0f} MB"

    return f"{count / 1e3:.0f} kB"


def arrived(path: Path) -> int:
    """Bytes of a file that are here: its own, or those of the partial file of an interrupted download."""
    if path.is_file():
        return path.stat().st_size

    return max((part.lstat().st_size for part in _parts(path)), default=0)


# ------------------------------------------------------------------------------------------------ the cache


def cached(remote: Remote) -> Path | None:
    """The file in the cache of huggingface-hub, where other programs have put it; None if it is not there.

    It is that of the catalogue's revision, or else of the newest one that was downloaded. Where the catalogue states a
    sha256, only a file with that one counts.
    """
    try:
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(remote.repo, remote.name, revision=it) for it in (remote.revision, None)]
    except Exception:  # not installed, settings that it does not accept, or a cache that must not be read
        return None

    paths = [Path(path) for path in found if isinstance(path, str)]
    return next((path for path in paths if remote.sha256 in (None, _cached_digest(path))), None)


def _cached_digest(path: Path) -> str:
    """The sha256 of a file of the cache, which is the name of what it links to where the system has links."""
    if path.is_symlink():
        blob = Path(os.readlink(path)).name  # which may be a link itself
        if _SHA256.fullmatch(blob):
            return blob

    return sha256_of(path)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, computed again only if the file has changed."""
    about = path.stat()
    return _digest_once(path, about.st_size, about.st_mtime_ns)


@cache
def _digest_once(path: Path, size: int, changed: int) -> str:
    """The sha256 of a file of this size and time."""
    return _digest(path, lambda: None)


def _digest(path: Path, report: Callable[[], None]) -> str:
    """The sha256 of a file; ``report`` is called after every part that was read."""
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
            report()

    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ downloads


def download(remote: Remote, path: Path, field: str, report: Report) -> None:
    """Download a file of a repository to ``path``, or copy it from the cache of huggingface-hub.

    An interrupted download leaves a hidden ``.part`` file, which the next call resumes. A file that is not what the
    catalogue or the server states is deleted.

    Raises:
        Missing: if the repository has no such file.
        UserError: begins with ``field``, and states the cause, what helps and the address for a download by hand.
        Exception: what ``report`` raises.
    """

    def tell(done: int, total: int) -> None:
        try:
            report(done, total)
        except Exception as stop:
            raise _Stopped from stop

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _fetch(remote, path, tell)
    except _Stopped as stopped:
        raise stopped.__cause__ or stopped from None
    except Exception as error:
        kind = Missing if _status(error) == 404 else UserError
        # Not from the error, which may hold an address with a password.
        raise kind(
            f"{field}: {path.name} could not be downloaded: {_cause(error, path)}, or download the file from "
            f"https://huggingface.co/{remote.repo} and put it into {path.parent}"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from downloading the same file."""
    from filelock import FileLock, Timeout

    lock = path.with_name(f".{path.name}.lock")
    if lock.is_symlink():  # some versions write through it
        lock.unlink()
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                with suppress(OSError):  # on Windows, where releasing the lock does this
                    lock.unlink()  # while it is held, so that it is nobody else's
    except Timeout as error:
        raise _Failed("another process is downloading this file; wait until it has finished") from error


def _fetch(remote: Remote, path: Path, report: Report) -> None:
    """Fill a partial file, verify it and give it its name."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    # 1. What the cache has is copied.
    here = cached(remote)
    if here is not None:
        part = _part(path, "")
        with _Part(part, here.stat().st_size, report) as opened, here.open("rb") as source:
            shutil.copyfileobj(source, opened, _BLOCK)
        os.replace(part, path)
        return

    # 2. Ask for the length and the digest.
    report(0, 0)
    url = hf_hub_url(remote.repo, remote.name, revision=remote.revision)
    offer = get_hf_file_metadata(url)
    size = offer.size or 0
    digest = remote.sha256 or offer.etag or ""

    # 3. Append what is missing to the partial file of exactly this content.
    part = _part(path, re.sub(r"\W", "", digest)[:16])
    try:
        with _Part(part, size or int((remote.size or 0) * _ABOUT), report) as opened:
            if size and opened.tell() > size:
                opened.empty()
            if not size or opened.tell() < size:
                _expect_room(size - opened.tell(), path.parent)
                _append(opened, url, size)

        # 4. Verify it, and give it its name.
        wrong = _wrong(part, remote, digest, lambda: report(size, size))
        if wrong:
            part.unlink()
            raise _Failed(
                f"the data from {_server()} {wrong}, so FastAR deleted it; if this network has a login page, log in "
                "with a browser, and run again"
            )
        os.replace(part, path)
    finally:
        if part.exists() and not part.stat().st_size:
            part.unlink()


class _Part(io.BufferedWriter):
    """A partial file, opened to append to it; it reports what arrives, and refuses more than the file can have."""

    def __init__(self, path: Path, most: int, report: Report):
        super().__init__(io.FileIO(path, "a"))
        self.most = most
        self.report = report

    def write(self, chunk: bytes) -> int:  # type: ignore[override]
        """Append a chunk."""
        if self.most and self.tell() + len(chunk) > self.most:
            self.empty()
            raise _Failed(
                f"the server sent more than the {self.most} bytes of the file, so FastAR deleted the data; run again"
            )

        count = super().write(chunk)
        self.report(self.tell(), self.most)
        return count

    def empty(self) -> None:
        """Delete what has arrived."""
        self.seek(0)
        self.truncate()


def _append(opened: _Part, url: str, size: int) -> None:
    """Append to a partial file what it lacks of ``size`` bytes (0: unknown).

    All that huggingface-hub does not document is here; tested with its versions 0.26 and 2.4.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    try:
        http_get(url, opened, resume_size=opened.tell(), headers=headers, expected_size=size or None)
    except Exception as error:
        if _status(error) == 416:  # it does not continue this part, and never would
            opened.empty()
        raise


def _expect_room(needed: int, folder: Path) -> None:
    """Raise :class:`_Failed` if the disk of a folder has less room than ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _Failed(
            f"the file needs {readable_size(needed)}, but only {readable_size(free)} are free on the disk; free disk "
            "space and run again"
        )


def _part(path: Path, identity: str) -> Path:
    """The partial file of a content; those of others are deleted, and what cannot be continued."""
    part = path.with_name(f".{path.name}.{identity or _UNKNOWN}.part")
    for other in _parts(path):
        # A link would be written through, and a pipe waited for.
        if other != part or not identity or other.is_symlink() or not other.is_file():
            other.unlink()

    return part


def _parts(path: Path) -> list[Path]:
    """Partial files of interrupted downloads of a file."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\w+\.part")
    return [part for part in path.parent.glob(".*.part") if name.fullmatch(part.name)]


def _wrong(part: Path, remote: Remote, digest: str, report: Callable[[], None]) -> str:
    """What is wrong with a file that has arrived, as the end of a sentence; "" if nothing is."""
    if _SHA256.fullmatch(digest):
        found = _digest(part, report)
        logging.info("FastAR: %s has the sha256 %s", remote.name, found)
        stated = "the catalogue states" if remote.sha256 else "the server states"
        return "" if found == digest else f"has the sha256 {found[:16]}..., not the sha256 that {stated}"

    # Nobody states a sha256 of it, as of small files.
    with part.open("rb") as opened:
        head = opened.read(512)
    if not head:
        return "is empty"
    return "is a web page" if printable(head).startswith("'<") else ""


# ------------------------------------------------------------------------------------------------ causes


def _cause(error: Exception, path: Path) -> str:
    """The cause of a failed download to ``path`` and what helps."""
    if isinstance(error, _Failed):
        return str(error)
    if isinstance(error, ImportError):
        return (
            f"huggingface-hub cannot be imported ({first_line(error)}); "
            "run python -m pip install --force-reinstall huggingface-hub"
        )
    if isinstance(error, OSError) and error.errno is not None:  # of the file system
        return (
            f"FastAR cannot write to {path.parent} ({error.strerror}); free disk space or allow writing there, and run "
            "again"
        )
    if type(error).__name__ == "OfflineModeIsEnabled":
        return (
            "HF_HUB_OFFLINE is set, and the Hugging Face cache does not hold this file; unset this variable and start "
            "again"
        )

    status = _status(error)
    if status in (401, 403):
        return (
            f"{_server()} refuses the download (status {status}); accept the terms on the model's page, log in "
            "(run hf auth login, or set HF_TOKEN to a valid token), and run again"
        )
    if status is not None:
        says = "has no such file" if status == 404 else "does not send the file"
        return f"{_server()} {says} (status {status}); run again later"

    return (
        f"the transfer from {_server()} failed ({_without_secrets(first_line(error))[:100].rstrip('.')}); check the "
        "network, HTTPS_PROXY, HF_TOKEN and HF_ENDPOINT, and run again to continue"
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status of a failed request; None if there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _server() -> str:
    """The host and port of the hub, without the name and password that HF_ENDPOINT may hold."""
    try:
        from huggingface_hub import constants

        parts = urlsplit(constants.ENDPOINT)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.hostname or 'the server'}{port}"
    except ValueError:  # of a malformed host or port, or a variable that the library does not accept
        return "the server"


def _without_secrets(text: str) -> str:
    """A library's message without the login of an address, of a mirror or a proxy, and without the token."""
    from huggingface_hub import get_token

    text = re.sub(r"[^\s'\"]*@", "...@", text)
    return text.replace(get_token() or "\n", "...")
