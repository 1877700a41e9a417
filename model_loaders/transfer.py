"""Download one file of a Hugging Face repository, the only network access of the package.

The library huggingface_hub finds the address, the token and the HTTP client, so that ``HF_ENDPOINT``, ``HF_TOKEN``,
``HF_HUB_OFFLINE`` and proxies work as everywhere. Its own transfer is not used: the versions below 1.2 append a whole
file to a part of it where a server ignores ranges, and all versions read 10 MB before anything can be cancelled or
kept.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from safetensors import safe_open

from ..errors import UserError, first_line
from .formats import SUFFIXES, printable

T = TypeVar("T")

# Called with (bytes that are here, bytes in all or 0) several times a second; what it raises cancels the download.
Report = Callable[[int, int], None]

_TICK = 0.1  # seconds between two reports
_CHUNK = 1 << 16  # bytes
_ATTEMPTS = 5  # in a row without a new byte, before a download fails
_PAUSE = 1.0  # seconds between two attempts
_AGAIN = (408, 429, 500, 502, 503, 504)  # statuses after which a server is asked again

# Most bytes of a file whose size neither the server nor the catalogue states.
_MOST_WEIGHTS = 20_000_000_000
_MOST_OTHER = 100_000_000
# The factor by which a file may differ from the catalogue's size, which may be that of the weights alone.
_ABOUT = 1.05
# Bytes of a longest text that only says where a file has moved.
_REDIRECTION = 10_000
_HEAD = 512  # bytes of a file that show its type
_LONGEST_HEADER = 100_000_000  # of safetensors, as its library allows
# The beginning of what servers send as JSON in place of a file.
_ERROR = re.compile(rb'\s*\{\s*"(error|errors|message|detail|status|code)"\s*:')


class Missing(UserError):
    """The repository has no such file."""


class _Failed(Exception):
    """A download has failed. The message is the cause and what helps."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class _Broken(Exception):
    """The connection failed; the cause is the exception of the HTTP client."""


@dataclass(frozen=True)
class Remote:
    """A file of a repository, as the catalogue knows it."""

    repo: str
    name: str
    revision: str | None  # None takes the newest
    sha256: str | None  # None if it is not pinned
    size: int | None  # about, in bytes; None if it is not known

    @property
    def most(self) -> int:
        """Bytes beyond which a transfer is ended whose size the server does not state."""
        if self.size is not None:
            return int(self.size * _ABOUT)
        return _MOST_WEIGHTS if self.name.endswith(SUFFIXES) else _MOST_OTHER


def readable_size(count: float) -> str:
    """Format bytes in decimal units: 832 MB, 1.91 GB."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    if count >= 1e6:
        return f"{count / 1e6:.0f} MB"

    return f"{count / 1e3:.0f} kB"


def not_a_model_file(head: bytes, name: str) -> str:
    """What a file evidently is instead of weights or a configuration, for messages; "" if it may be one.

    ``head`` are its first bytes; ``name`` tells weights, which are never a text, from configurations, which are.
    """
    if not head:
        return "an empty file"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _LONGEST_HEADER:
        return ""  # safetensors: the length of the header may begin with any character

    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return "a web page"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer"
    if _ERROR.match(head):
        return "an error message"

    is_sentence = len(head.split()) > 1 and printable(head)  # such as "Entry not found"
    return "a text" if is_sentence and name.endswith(SUFFIXES) else ""


def spoiled(path: Path) -> str:
    """What a file evidently is instead of weights or a configuration, from its first bytes.

    "" if it may be one or cannot be read.
    """
    try:
        with path.open("rb") as opened:
            return not_a_model_file(opened.read(_HEAD), path.name)
    except OSError:
        return ""


def arrived(path: Path) -> int:
    """Bytes of a file that are here: its own, or those of the partial file of an interrupted download."""
    if path.is_file():
        return path.stat().st_size

    return max((part.stat().st_size for part in _parts(path)), default=0)


def _parts(path: Path) -> list[Path]:
    """Partial files of interrupted downloads of a file."""
    return list(path.parent.glob(f".{path.name}.*.part"))


def download(remote: Remote, path: Path, field: str, report: Report) -> None:
    """Download a file of a repository to ``path``.

    An interrupted download leaves a hidden ``.part`` file, and the next call resumes it. Before the file gets its name
    its type and length are checked, and its sha256 where the catalogue or the server states one. A part that is too
    long, does not verify or that the server refuses to continue (status 416) is deleted, and the download starts again,
    once.

    Raises:
        Missing: if the repository has no such file.
        UserError: begins with ``field``, and states the cause, what helps and the address for a download by hand.
        Exception: what ``report`` raises, within a second at any speed.
    """
    folder = path.parent
    if path.is_dir():
        raise UserError(
            f"{field}: {path.name} could not be downloaded: {path} is a folder; "
            "rename it, so that the file can have its name"
        )

    by_hand = f"or get it from https://huggingface.co/{remote.repo} and put it into {folder}"
    existed = folder.is_dir()
    try:
        _check_library()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _download(remote, path, report)
    except _Failed as failure:
        kind = Missing if failure.status == 404 else UserError
        raise kind(f"{field}: {path.name} could not be downloaded: {failure}, {by_hand}") from failure
    except OSError as error:  # of the file system: those of the connection are caught where they arise
        raise UserError(
            f"{field}: {path.name} could not be downloaded: {_of_the_disk(error, folder)}, {by_hand}"
        ) from error
    finally:
        if not existed:
            with suppress(OSError):  # it holds something
                folder.rmdir()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from downloading the same file; raises :class:`_Failed` if one does."""
    from filelock import FileLock, Timeout

    lock = path.with_name(f".{path.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                with suppress(OSError):  # on Windows, where the lock itself does this when it is released
                    lock.unlink()  # while it is held, so that it is nobody else's
    except Timeout as error:
        raise _Failed("another process is downloading it; wait for that to end") from error


def _check_library() -> None:
    """Raise :class:`_Failed` if huggingface-hub is not installed or broken."""
    try:
        import filelock  # noqa: F401
        import huggingface_hub  # alone first, so that a missing package is told from a missing part of it
        import huggingface_hub.file_download
        import huggingface_hub.utils  # noqa: F401
    except Exception as error:  # a broken installation can raise any exception
        if isinstance(error, ModuleNotFoundError) and error.name == "huggingface_hub":
            raise _Failed("huggingface-hub is not installed; run python -m pip install huggingface-hub") from error

        raise _Failed(
            f"huggingface-hub is installed but cannot be imported ({first_line(error)}); "
            "run python -m pip install --force-reinstall huggingface-hub"
        ) from error


def _download(remote: Remote, path: Path, report: Report) -> None:
    """Fill a partial file, verify it and give it its name."""
    from huggingface_hub import hf_hub_url

    # 1. Ask for the length and the digest.
    url = hf_hub_url(remote.repo, remote.name, revision=remote.revision)
    if urlsplit(url).scheme not in ("http", "https"):
        raise _Failed(
            f"the address {url[:60]} does not begin with https://; correct the variable HF_ENDPOINT or remove it"
        )
    offer, headers = _ask(url, lambda: report(0, 0))
    etag = offer.etag or ""
    size = offer.size or 0
    if offer.location != url and size < _REDIRECTION:
        size = 0

    # 2. Choose the partial file of exactly this content, and remove those of others.
    identity = remote.sha256 or re.sub("[^0-9A-Za-z]", "", etag)
    part = path.with_name(f".{path.name}.{identity[:16] or 'unknown'}.part")
    if identity:
        _remove_parts(path, but=part)
    else:
        part.unlink(missing_ok=True)  # nothing tells whether it is a part of the same file

    # 3. Append what is missing, and verify. What was resumed and does not verify is downloaded once more from the
    # beginning.
    try:
        resumed = part.exists()
        size = _fill(part, remote, url, headers, size, report)
        problem = _problem(part, remote, etag, size, report)
        if problem and resumed:
            part.unlink()
            logging.warning("FastAR: deleted %s, which %s; the download starts again", part, problem)
            size = _fill(part, remote, url, headers, size, report)
            problem = _problem(part, remote, etag, size, report)
        if problem:
            part.unlink()
            raise _Failed(f"what {urlsplit(url).netloc} sent {problem}; it was deleted; run again")
    finally:
        if part.exists() and not part.stat().st_size:
            part.unlink()

    # 4. Give it its name.
    os.replace(part, path)
    _remove_parts(path)


def _remove_parts(path: Path, but: Path | None = None) -> None:
    """Remove the partial files of a file, all or all but one."""
    for part in _parts(path):
        if part != but:
            part.unlink()


# ------------------------------------------------------------------------------------------------ the connection


def _ask(url: str, wait: Callable[[], None]) -> tuple[Any, dict[str, str]]:
    """What the server says of a file (``etag``, ``size``, ``location``), and the headers for its transfer.

    A server answers 401 to an expired token even where the file is public, so a refused token is left out.
    """
    from huggingface_hub.file_download import get_hf_file_metadata
    from huggingface_hub.utils import build_hf_headers

    headers: dict[str, str] = {}

    def ask(token: bool | None) -> Any:
        def answers() -> Generator[Any, None, None]:
            yield build_hf_headers(token=token)
            yield get_hf_file_metadata(url, token=token, timeout=10)

        with closing(_in_background(answers(), wait)) as answer:
            headers.update(next(answer))
            return next(answer)

    try:
        return ask(None), headers
    except _Broken as broken:
        with_token = "authorization" in headers
        if not with_token or _status(broken) not in (401, 403):
            raise _failure(broken, url) from broken

    headers.clear()
    try:
        offer = ask(False)
    except _Broken as broken:
        raise _failure(broken, url, with_token) from broken

    logging.warning(
        "FastAR: %s refuses the Hugging Face token of this computer, which may have expired; downloading without it",
        urlsplit(url).netloc,
    )
    return offer, headers


def _answer(url: str, headers: Mapping[str, str], begin: int) -> Generator[Any, None, None]:
    """A request for a file from byte ``begin`` on.

    Yields its (status, headers), then the bytes in chunks as they arrive.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    client: Any = get_session()
    asked = {**headers, "Accept-Encoding": "identity"}
    if begin:
        asked["Range"] = f"bytes={begin}-"

    if callable(client.stream):  # httpx, from version 1.0 on; of requests it is a setting
        options = {"timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT, "follow_redirects": True}
        with client.stream("GET", url, headers=asked, **options) as response:
            yield response.status_code, response.headers
            yield from response.iter_bytes()
        return

    # requests
    with client.get(url, headers=asked, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, stream=True) as response:
        yield response.status_code, response.headers

        read = getattr(response.raw, "read1", None)
        if read is None:  # urllib3 before 2.1; it waits for a whole chunk, and loses a part of one
            yield from response.iter_content(_CHUNK)
            return
        while chunk := read(_CHUNK, decode_content=True):
            yield chunk


def _in_background(source: Generator[T, None, None], wait: Callable[[], None]) -> Generator[T, None, None]:
    """The items of an iterator that a thread advances, so that ``wait`` can be called ten times a second meanwhile.

    The thread ends after the item that it waits for when this generator is closed.

    Raises:
        _Broken: for what the iterator raises.
    """
    items: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=16)
    closed = threading.Event()

    def hand_over(kind: str, item: Any = None) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                return items.put((kind, item), timeout=_TICK)

    def work() -> None:
        try:
            for item in source:
                hand_over("item", item)
                if closed.is_set():
                    break
            hand_over("end")
        except BaseException as error:
            hand_over("error", error)
        finally:
            source.close()

    threading.Thread(target=work, daemon=True, name="fastar-download").start()
    try:
        while True:
            try:
                kind, item = items.get(timeout=_TICK)
            except queue.Empty:
                wait()
                continue

            if kind == "end":
                return
            if kind == "error":
                raise _Broken from item
            yield item
    finally:
        closed.set()


def _fill(part: Path, remote: Remote, url: str, headers: Mapping[str, str], size: int, report: Report) -> int:
    """Append to a partial file what it lacks of ``size`` bytes (0: unknown); returns the size of the whole file."""
    attempts_in_vain = 0  # without a new byte
    restarts = 0
    with part.open("ab") as opened:
        while True:
            begin = opened.tell()
            if size and begin > size:
                _start_again(opened, f"{begin} bytes, and the file has {size}")
                continue
            if size and begin == size:
                return size

            try:
                return _append(opened, remote, url, headers, size, report)
            except _NotContinued as found:
                restarts += 1
                if restarts > 1:
                    raise _Failed(f"{found}; run again later") from found
                _start_again(opened, str(found))
            except _Broken as broken:
                attempts_in_vain = 0 if opened.tell() > begin else attempts_in_vain + 1
                if _status(broken) not in (None, *_AGAIN) or attempts_in_vain >= _ATTEMPTS:
                    raise _failure(broken, url) from broken

                until = time.monotonic() + _PAUSE
                while time.monotonic() < until:
                    report(opened.tell(), size)
                    time.sleep(_TICK)


class _NotContinued(Exception):
    """The server does not continue a partial file. The message is the end of a sentence about it."""


def _append(opened: BinaryIO, remote: Remote, url: str, headers: Mapping[str, str], size: int, report: Report) -> int:
    """Append the bytes of one request to a partial file, see :func:`_fill`."""
    begin = opened.tell()
    server = urlsplit(url).netloc
    reported = time.monotonic()

    def wait() -> None:
        nonlocal reported
        if time.monotonic() - reported >= _TICK:
            report(opened.tell(), size)
            reported = time.monotonic()

    _check_size(remote, size, server)
    with closing(_in_background(_answer(url, headers, begin), wait)) as answer:
        status, about = next(answer)

        # 1. Does the answer continue the part?
        if status == 416 and begin:
            raise _NotContinued("the server would not continue (status 416)")
        if status == 206 and not str(about.get("Content-Range", "")).startswith(f"bytes {begin}-"):
            raise _NotContinued("the server continued in another place") if begin else _Broken(status)
        if status == 200 and begin:
            _start_again(opened, "the server does not continue, because it ignores ranges")
        elif status not in (200, 206):
            raise _Broken(status)

        # 2. How long is the file, and is there room for it?
        stated = _stated(status, about)
        if size and stated and stated != size:
            raise _Failed(f"{server} promised {size} bytes and sends {stated}; run again later")
        size = 0 if about.get("Content-Encoding") else stated or size
        _check_size(remote, size, server)
        lacking = size - opened.tell()
        free = shutil.disk_usage(Path(opened.name).parent).free
        if lacking > free:
            raise _Failed(
                f"it needs {readable_size(lacking)} on the disk and {readable_size(free)} are free; make room"
            )

        # 3. Append.
        _write(opened, answer, size or remote.most, remote.name, server, wait)
        if size and opened.tell() < size:
            raise _Broken("the connection ended early")
        return opened.tell()


def _write(
    opened: BinaryIO, chunks: Iterator[bytes], most: int, name: str, server: str, wait: Callable[[], None]
) -> None:
    """Write the bytes of an answer, up to ``most`` of a file; :class:`_Failed` if it is evidently no model file."""
    head = b""  # the beginning of the file, which arrives in pieces of any length
    checked = opened.tell() > 0
    for chunk in chunks:
        if not checked:
            head += chunk
            if len(head) >= _HEAD:
                _refuse_page(opened, head, name, server)
                checked = True

        if opened.tell() + len(chunk) > most:
            _start_again(opened, f"more than the {most} bytes of the file")
            raise _Failed(
                f"{server} sent more than the {most} bytes of the file; all of it was deleted; run again later"
            )
        opened.write(chunk)
        wait()

    if not checked:
        _refuse_page(opened, head, name, server)


def _refuse_page(opened: BinaryIO, head: bytes, name: str, server: str) -> None:
    """Empty a partial file and raise :class:`_Failed` if its beginning is evidently not that of a model file."""
    if found := not_a_model_file(head, name):
        _start_again(opened, found)
        raise _Failed(
            f"{server} sent {found} in its place; "
            "if this network has a login page, log in with a browser, and run again"
        )


def _start_again(opened: BinaryIO, why: str) -> None:
    """Empty a partial file."""
    opened.truncate(0)
    opened.seek(0)
    logging.warning("FastAR: deleted what %s held: %s", opened.name, why)


def _stated(status: int, about: Mapping[str, str]) -> int:
    """The size of the whole file according to an answer's headers; 0 if they do not say."""
    if about.get("Content-Encoding", "identity") != "identity":
        return 0  # of the compressed file

    if status == 206:
        text = str(about.get("Content-Range", "")).rpartition("/")[2]
    else:
        text = str(about.get("Content-Length", ""))
    return int(text) if text.isdigit() else 0


def _check_size(remote: Remote, size: int, server: str) -> None:
    """Refuse a file of another size than the catalogue's before it is downloaded."""
    if not size or not remote.size or not remote.sha256:
        return

    if not remote.size / _ABOUT <= size <= remote.size * _ABOUT:
        raise _Failed(
            f"{server} offers {readable_size(size)}, and the file has {readable_size(remote.size)}; "
            f"if this network has a login page, log in with a browser{_mirror(server)}"
        )


# ------------------------------------------------------------------------------------------------ verification


def _problem(part: Path, remote: Remote, etag: str, size: int, report: Report) -> str:
    """What is wrong with a file that has arrived, as the end of a sentence; "" if nothing is."""
    arrived = part.stat().st_size
    if arrived != size:
        return f"has {arrived} bytes in place of {size}"

    digest = hashlib.sha256()
    with part.open("rb") as opened:
        while chunk := opened.read(1 << 22):
            digest.update(chunk)
            report(size, size)
    found = digest.hexdigest()
    logging.info("FastAR: %s has the sha256 %s", remote.name, found)

    if remote.sha256 and found != remote.sha256:
        return f"has another sha256 than the file of the catalogue ({found[:16]}...)"
    stated = etag if re.fullmatch("[0-9a-f]{64}", etag) else None
    if stated and found != stated:
        return f"has another sha256 than the server states ({found[:16]}...)"

    if kind := spoiled(part):
        return f"is {kind}"
    if remote.sha256 or stated:
        return ""
    return _damage(part, Path(remote.name).suffix)


def _damage(path: Path, suffix: str) -> str:
    """What is wrong with a file whose sha256 is not known, as the end of a sentence; "" if nothing is."""
    try:
        if suffix == ".safetensors":
            with safe_open(str(path), framework="np"):
                return ""
        if suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif suffix in SUFFIXES and not zipfile.is_zipfile(path):
            return "is not a complete torch checkpoint"
    except Exception as error:  # a damaged file can raise any exception
        return f"is not a complete {suffix} file ({first_line(error)})"

    return ""


# ------------------------------------------------------------------------------------------------ causes


def _status(broken: _Broken) -> int | None:
    """The HTTP status of a failed request; None if there was no answer."""
    if broken.args and isinstance(broken.args[0], int):
        return broken.args[0]

    return getattr(getattr(broken.__cause__, "response", None), "status_code", None)


def _failure(broken: _Broken, url: str, with_token: bool = False) -> _Failed:
    """The cause of a failed request and what helps."""
    status = _status(broken)
    server = urlsplit(url).netloc
    answer = getattr(broken.__cause__, "response", None)
    code = "" if answer is None else answer.headers.get("X-Error-Code")

    if status == 404:
        return _Failed(f"{server} has no such file (status 404){_mirror(server)}", status)
    if status in (401, 403) and with_token:
        return _Failed(
            f"{server} refuses it with the Hugging Face token of this computer and without one (status {status}); "
            "renew the token with hf auth login, or accept the model's terms on its page",
            status,
        )
    if code == "RepoNotFound":
        return _Failed(f"{server} has no repository of that name (status {status}){_mirror(server)}", status)
    if status in (401, 403):
        return _Failed(
            f"{server} refuses it without a token (status {status}); "
            "accept the model's terms on its page, set HF_TOKEN and start again",
            status,
        )
    if status == 429:
        return _Failed(f"{server} gets too many requests (status 429); run again in some minutes", status)
    if status is not None:
        return _Failed(f"{server} has a fault (status {status}); run again later", status)

    cause = broken.__cause__ or broken
    if type(cause).__name__ == "OfflineModeIsEnabled":
        return _Failed("HF_HUB_OFFLINE is set; remove that variable and start again")
    return _Failed(
        f"{server} cannot be reached ({first_line(cause).rstrip('.')}); what has arrived is kept; "
        "check the network, a proxy in HTTPS_PROXY, and HF_ENDPOINT, which can name a mirror"
    )


def _mirror(server: str) -> str:
    """What helps against a server that is not Hugging Face's."""
    return "" if server == "huggingface.co" else f"; HF_ENDPOINT names {server}: remove that variable"


def _of_the_disk(error: OSError, folder: Path) -> str:
    """The cause of a failed access to the file system and what helps."""
    found = error.strerror or first_line(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {folder} is full ({found}); make room and run again, which resumes it"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"{folder} is not a folder ({found}); rename the file that is in its place"

    return f"{folder} cannot be written to ({found}); allow that"
