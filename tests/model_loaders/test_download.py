"""Downloads from a server on this machine, with faults: each ends
in the whole file or in one sentence, and the next completes it.
"""

import errno
import hashlib
import http.server
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import timeouts
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub, transfer

REPO = "jadechoghari/mar"
NAME = "mar-base.safetensors"
# A safetensors file whose header has 60 bytes, so that the file begins with "<" as web pages do.
HEADER = b'{"x":{"dtype":"U8","shape":[9932],"data_offsets":[0,9932]}}'.ljust(60)
CONTENT = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(256)) * 38 + bytes(204)
WRONG = CONTENT[:5000] + b"!" + CONTENT[5001:]
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PAGE = b"<html><body>Please log in to the network of the hotel.</body></html>"
assert len(CONTENT) == 10_000 and CONTENT.startswith(b"<")
forked = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Interrupt(Exception):
    """What a cancelled run raises in the progress function."""


def resolve(folder: Path, progress=None) -> Path:
    return hub.resolve("mar-base", "mar", [folder], folder, progress)


def entry(**changes: object) -> hub.Entry:
    fields = {"id": "mar-base", "family": "mar", "file": NAME, "repo": REPO, "revision": None}
    fields |= {"size": len(CONTENT), "sha256": None, "licence": "MIT", "decoder": "kl16", "parts": {}}
    return hub.Entry(**{**fields, **changes})


def refused(folder: Path, words: str = ": ") -> str:
    with pytest.raises(UserError, match=words) as error:
        resolve(folder)
    text = str(error.value)
    assert text.startswith(f"checkpoint: {NAME}") and "\n" not in text and len(text) <= 400
    return text


def torch_file() -> bytes:
    """An archive as torch.save writes them."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(9870))
    return out.getvalue()


# What the server holds, by the end of the name.
HELD = {
    ".safetensors": CONTENT,
    ".pt": torch_file(),
    ".json": b'{"a": 1}'.ljust(10_000),
    ".bin": torch_file(),
    ".txt": b"a b\n" * 2500,
}


class Server(http.server.ThreadingHTTPServer):
    """A model hub that holds :data:`HELD`, or ``sends``; ``requests`` collects (method, path, headers)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, dict]] = []
        self.status = 200
        self.redirects = False
        self.sends: bytes | None = None
        self.break_at: int | None = None  # closes the connection at this byte of the file
        self.hold_at: int | None = None  # sends nothing from this byte on, and waits until the client hangs up
        self.held, self.hung_up = threading.Event(), threading.Event()
        self.connection: socket.socket | None = None  # the one on which it waits
        self.drip = 0.0  # seconds between 500 bytes
        self.etag: str | None = None  # None: the sha256 of the content of that name
        self.ranges_are = "served"  # or "ignored", "refused" (status 416), "elsewhere" (from the byte before)
        self.promises: int | None = None  # the length that it states before the transfer
        self.states_length = True
        self.accepts_token = True
        self.lacks = ""  # the name of a file that is not in the repository
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def ranges(self) -> list[str | None]:
        return [headers.get("range") for method, _, headers in self.requests if method == "GET"]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        server = self.server
        if "/resolve/" in self.path:  # huggingface_hub may ask other things of its own accord
            server.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if server.redirects and self.command == "GET" and not self.path.startswith("/storage"):
            self.send_response(302)
            self.send_header("Location", f"{server.url.replace('127.0.0.1', 'localhost')}/storage{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = 404 if Path(self.path).name == server.lacks else server.status
        if not server.accepts_token and "Authorization" in self.headers:
            status = 401
        whole = HELD.get(Path(self.path).suffix, CONTENT) if server.sends is None else server.sends
        wanted = self.headers.get("Range") if server.ranges_are != "ignored" else None
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if wanted and (server.ranges_are == "refused" or begin >= len(whole)):
            status = 416
        begin -= bool(wanted) and server.ranges_are == "elsewhere"
        body = whole[begin:] if status == 200 else b""
        self.send_response(206 if wanted and status == 200 else status)
        etag = server.etag
        if etag is None:
            etag = hashlib.sha256(HELD.get(Path(self.path).suffix, CONTENT)).hexdigest()
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Accept-Ranges", "bytes")
        promised = server.promises if self.command == "HEAD" and server.promises is not None else len(body)
        if server.states_length or status != 200:
            self.send_header("Content-Length", str(promised))
        if wanted and status == 200:
            self.send_header("Content-Range", f"bytes {begin}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        if self.command == "GET":
            self.send(body, begin)

    def send(self, body: bytes, begin: int) -> None:
        server = self.server
        if server.break_at is not None:
            body = body[: max(0, server.break_at - begin)]
        try:
            if server.hold_at is not None:
                self.wfile.write(body[: server.hold_at - begin])
                server.connection = self.connection
                server.held.set()
                self.connection.recv(1)  # nothing, when the client has hung up
                server.hung_up.set()
                return
            while server.drip and body:
                self.wfile.write(body[:500])
                body = body[500:]
                time.sleep(server.drip)
            self.wfile.write(body)
        except OSError:
            server.hung_up.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    """A running :class:`Server` that huggingface_hub takes for its hub, with a catalogue size to match."""
    constants = pytest.importorskip("huggingface_hub.constants")
    running = Server()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    address = running.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", running.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
    # Before 1.0 that module kept copies.
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)
    monkeypatch.setattr(transfer, "_PAUSE", 0.01)
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(),))
    yield running
    running.shutdown()
    running.server_close()


def hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.part"))


def left(folder: Path) -> list[str]:
    """Names of everything in a folder."""
    return sorted(path.name for path in folder.iterdir())


def part_of(folder: Path, content: bytes) -> Path:
    """A partial file, as an interrupted download leaves it."""
    part = folder / f".{NAME}.{DIGEST[:16]}.part"
    part.write_bytes(content)
    return part


def test_download(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    target = tmp_path / "models" / "fastar"
    path = resolve(target, progress=lambda done, total: seen.append((done, total)))
    assert path == target / NAME and path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and all(done <= total for done, total in seen)
    assert [path for _, path, _ in server.requests] == [f"/{REPO}/resolve/main/{NAME}"] * 2
    assert left(target) == [NAME]
    asked = len(server.requests)
    assert resolve(target) == path and len(server.requests) == asked


def cancelled_at(server: Server, folder: Path, count: int) -> None:
    """Cancel a download when so many bytes have arrived, and no more come."""
    server.hold_at = count

    def stop(done: int, total: int) -> None:
        if done == count and server.held.is_set():
            raise Interrupt

    with pytest.raises(Interrupt):
        resolve(folder, progress=stop)


def test_a_cancelled_download_goes_on(server: Server, tmp_path: Path) -> None:
    cancelled_at(server, tmp_path, 2000)
    (part,) = hidden(tmp_path)
    assert part.read_bytes() == CONTENT[:2000] and left(tmp_path) == [part.name]
    server.hold_at = None
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=2000-"] and left(tmp_path) == [NAME]


def readers() -> set[threading.Thread]:
    """The threads that read from a server."""
    return {thread for thread in threading.enumerate() if thread.name == "fastar-download"}


def test_a_cancelled_download_ends_before_its_connection(server: Server, tmp_path: Path, monkeypatch) -> None:
    """The server is silent from the thousandth byte on, and neither side gives up."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 3600)
    before = readers()
    cancelled_at(server, tmp_path, 1000)
    (reader,) = readers() - before
    assert reader.is_alive() and not server.hung_up.is_set()

    server.connection.shutdown(socket.SHUT_RDWR)
    reader.join(60)
    assert not reader.is_alive(), "a reader ends with its connection"


def test_cancelling_while_the_server_does_not_answer(tmp_path: Path, server: Server, monkeypatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(handler: Handler) -> None:
        entered.set()
        leave.wait(60)

    monkeypatch.setattr(Handler, "do_HEAD", slow)

    def stop(done: int, total: int) -> None:
        if entered.is_set():
            raise Interrupt

    with pytest.raises(Interrupt):
        resolve(tmp_path, progress=stop)
    assert not leave.is_set() and left(tmp_path) == []
    leave.set()


@pytest.mark.slow
def test_broken_at_every_tenth(server: Server, tmp_path: Path) -> None:
    for tenth in range(1, 10):
        server.break_at = len(CONTENT) * tenth // 10
        refused(tmp_path)
        assert not (tmp_path / NAME).exists()
        assert all(CONTENT.startswith(part.read_bytes()) for part in hidden(tmp_path))
    server.break_at = None
    assert resolve(tmp_path).read_bytes() == CONTENT and not hidden(tmp_path)


def test_a_part_of_another_version_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.0123456789abcdef.part").write_bytes(b"old")
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None] and left(tmp_path) == [NAME]


@pytest.mark.parametrize("ranges_are", ["ignored", "refused", "elsewhere"])
def test_a_part_that_the_server_does_not_continue_starts_again(
    server: Server, tmp_path: Path, ranges_are: str, caplog: pytest.LogCaptureFixture
) -> None:
    part = part_of(tmp_path, CONTENT[:4000])
    server.ranges_are = ranges_are
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == (["bytes=4000-"] if ranges_are == "ignored" else ["bytes=4000-", None])
    assert str(part) in caplog.text and "deleted" in caplog.text


def test_a_part_that_is_too_long_starts_again(server: Server, tmp_path: Path, caplog) -> None:
    part = part_of(tmp_path, CONTENT + b"x")
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == [None] and str(part) in caplog.text


def test_a_part_that_is_complete_is_only_verified(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path, CONTENT)
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == []


@pytest.mark.parametrize("length", [4000, 10_000])
def test_a_part_with_a_wrong_bit_starts_again(server: Server, tmp_path: Path, length: int, caplog) -> None:
    part = part_of(tmp_path, (CONTENT[:100] + b"!" + CONTENT[101:])[:length])
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges()[-1] is None and f"deleted {part}" in caplog.text and "sha256" in caplog.text


def test_a_server_that_never_continues_ends_in_a_sentence(server: Server, tmp_path: Path) -> None:
    """Each answer breaks off, and a part of it is refused."""
    server.ranges_are, server.break_at = "refused", 4000
    refused(tmp_path, "status 416")
    assert server.ranges() == [None, "bytes=4000-", None, "bytes=4000-"]
    server.ranges_are, server.break_at = "served", None
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_part_of_unknown_content_is_not_continued(server: Server, tmp_path: Path) -> None:
    """Nothing tells whether it belongs to the file that a mirror
    without digests offers; the part of the other is kept until the end.
    """
    part_of(tmp_path, CONTENT[:4000])
    (tmp_path / f".{NAME}.unknown.part").write_bytes(b"other")
    server.etag = ""
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == [None]


# ------------------------------------------------------------------------------------------------ what is not the file


def test_a_login_page_is_no_model(server: Server, tmp_path: Path) -> None:
    """It answers 200 to everything."""
    server.sends, server.etag = PAGE, ""
    text = refused(tmp_path / "new", "sent a web page")
    assert "log in" in text and "HF_ENDPOINT" not in text
    assert left(tmp_path) == []  # not even the folder
    server.sends, server.etag = None, None
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_login_page_under_the_name_of_a_model_can_be_left(server: Server, tmp_path: Path) -> None:
    """Of a download by an earlier version: the entry is offered again, and all ways to name it replace the page."""
    label = "mar-base (download 10 kB, not pinned)"
    assert hub.menu("mar", [NAME], [tmp_path]) == [NAME]
    for choice in (label, "mar-base", NAME):
        for wrong in (PAGE, b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"):
            (tmp_path / NAME).write_bytes(wrong)
            assert hub.menu("mar", [NAME], [tmp_path / "none", tmp_path]) == [label]
            assert hub.absent(choice, "mar", [tmp_path]).id == "mar-base"
            path = hub.resolve(choice, "mar", [tmp_path], tmp_path)
            assert path == tmp_path / NAME and path.read_bytes() == CONTENT
            assert hub.absent(choice, "mar", [tmp_path]) is None
            assert hub.menu("mar", [NAME], [tmp_path]) == [NAME]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"Entry not found", "a text"),
        (b'{"error":"Invalid username or password."}', "an error message"),
        (b'{"detail": "Too many requests"}', "an error message"),
    ],
)
def test_a_servers_sentence_under_the_name_of_a_model_can_be_left(
    server: Server, tmp_path: Path, text: bytes, found: str
) -> None:
    """Of an earlier version that did not check, or sent now."""
    (tmp_path / NAME).write_bytes(text)
    assert NAME not in hub.menu("mar", [NAME], [tmp_path])
    assert hub.absent(NAME, "mar", [tmp_path]) == hub.absent("mar-base", "mar", [tmp_path]) is not None
    assert resolve(tmp_path).read_bytes() == CONTENT
    (tmp_path / NAME).unlink()
    server.sends = text
    assert f"sent {found} in its place" in refused(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_servers_sentence_is_no_configuration(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(parts={"config.json": None}, file="folder"),))
    server.sends = b'{"error": "Repository not found"}'
    with pytest.raises(UserError, match="config.json could not be downloaded: .* sent an error message in its place"):
        resolve(tmp_path)
    assert not list(tmp_path.iterdir())
    server.sends = None
    assert (resolve(tmp_path) / "config.json").read_bytes() == HELD[".json"]


def test_a_folder_under_the_name_of_a_file_is_said_before_the_transfer(server: Server, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert "is a folder; rename it" in refused(tmp_path)
    assert not server.requests
    (tmp_path / NAME).rename(tmp_path / "other")
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_file_that_arrives_byte_by_byte(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first byte alone looks like a page."""
    answer = transfer._answer

    def pieces(*about: object):
        source = answer(*about)
        yield next(source)
        for chunk in source:
            yield from (chunk[i : i + 5] for i in range(0, len(chunk), 5))

    monkeypatch.setattr(transfer, "_answer", pieces)
    assert resolve(tmp_path).read_bytes() == CONTENT
    (tmp_path / NAME).unlink()
    server.sends, server.etag = PAGE * 20, ""
    refused(tmp_path, "sent a web page")
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.bin", "x.json", "x.txt"])
def test_each_type_is_checked_before_the_name_is_given(server: Server, tmp_path: Path, name: str) -> None:
    server.etag = ""
    remote = transfer.Remote(REPO, name, None, None, None)
    transfer.download(remote, tmp_path / name, "checkpoint", lambda *_: None)
    right = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    wrong = [PAGE, b"\n " + PAGE, b"\xef\xbb\xbf" + PAGE, b""] + (
        [right[:-10], b"abc" * 500] if name != "x.txt" else []
    )
    if name == "x.json":
        wrong[-2] = b'{"a": '
    for server.sends in wrong:
        with pytest.raises(UserError, match=f"^checkpoint: {name} could not be downloaded: "):
            transfer.download(remote, tmp_path / name, "checkpoint", lambda *_: None)
        assert left(tmp_path) == [], server.sends[:20]


@pytest.mark.parametrize("states_length", [True, False])
def test_no_more_than_promised_is_received(server: Server, tmp_path: Path, states_length: bool) -> None:
    """The server promises 10 kB and sends 30 MB, which no client has to receive."""
    server.sends, server.promises, server.states_length = CONTENT + bytes(30_000_000), len(CONTENT), states_length
    largest = 0

    def watch(done: int, total: int) -> None:
        nonlocal largest
        largest = max(largest, done)

    with pytest.raises(UserError, match="checkpoint: .*(promised 10000 bytes|more than)"):
        resolve(tmp_path, watch)
    assert largest <= len(CONTENT) and left(tmp_path) == []


def test_without_a_stated_length_the_catalogue_is_the_limit(server: Server, tmp_path: Path) -> None:
    server.states_length = False
    assert resolve(tmp_path).read_bytes() == CONTENT
    (tmp_path / NAME).unlink()
    server.sends, server.etag = CONTENT + bytes(600), ""
    refused(tmp_path, "more than the 10500 bytes")
    assert left(tmp_path) == []


def test_a_pinned_file_of_another_size_is_not_even_downloaded(server: Server, tmp_path: Path, monkeypatch) -> None:
    pinned = entry(sha256="0" * 64, size=20_000)
    monkeypatch.setattr(hub, "_catalogue", lambda: (pinned,))
    text = refused(tmp_path, "offers 10 kB, and the file has 20 kB")
    assert "HF_ENDPOINT" in text and server.ranges() == []


def test_a_connection_that_breaks_is_continued(server: Server, tmp_path: Path, monkeypatch) -> None:
    """Within one download: the server closes after 3000 bytes of each answer."""
    send = Handler.send
    monkeypatch.setattr(Handler, "send", lambda self, body, begin: send(self, body[:3000], begin))
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=3000-", "bytes=6000-", "bytes=9000-"]


def test_a_token_stays_with_the_hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server.redirects = True  # large files lie on another host
    assert resolve(tmp_path).read_bytes() == CONTENT
    told = [(path, headers.get("authorization")) for _, path, headers in server.requests]
    assert told[0][1] == "Bearer hf_test" and told[-1] == (f"/storage/{REPO}/resolve/main/{NAME}", None)


def test_an_expired_token_does_not_keep_public_files_away(server: Server, tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    server.accepts_token = False
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert "refuses the Hugging Face token" in caplog.text
    assert [headers.get("authorization") for _, _, headers in server.requests] == ["Bearer hf_expired", None, None]


def test_a_token_that_does_not_help(server: Server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    server.status = 401
    assert "with the Hugging Face token of this computer and without one (status 401)" in refused(tmp_path)


def test_no_room(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 0, 9000))
    text = refused(tmp_path, "10 kB .* 9 kB are free; make room")
    assert "HF_ENDPOINT" not in text and left(tmp_path) == []
    part_of(tmp_path, CONTENT[:2000])  # what is there counts
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up(server: Server, tmp_path: Path) -> None:
    part = tmp_path / f".{NAME}.{DIGEST[:16]}.part"
    part.symlink_to("/dev/full")
    text = refused(tmp_path, "the disk of .* is full .No space left")
    assert "HF_ENDPOINT" not in text
    part.unlink(missing_ok=True)
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_folder_that_must_not_be_written(server: Server, tmp_path: Path, monkeypatch) -> None:
    open_path = Path.open

    def open_read_only(path: Path, mode: str = "r", *args: object, **more: object) -> object:
        if mode == "ab":
            raise OSError(errno.EROFS, "Read-only file system")
        return open_path(path, mode, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_read_only)
        text = refused(tmp_path, "cannot be written to .Read-only file system")
    assert "HF_ENDPOINT" not in text and "HF_TOKEN" not in text
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_a_refusal(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    text = refused(tmp_path, str(status))
    assert ("HF_TOKEN" in text) is (status in (401, 403))
    assert f"https://huggingface.co/{REPO}" in text and str(tmp_path) in text


def test_an_address_without_https(server: Server, tmp_path: Path, monkeypatch) -> None:
    address = "127.0.0.1:80/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "127.0.0.1:80")
    refused(tmp_path, "does not begin with https://; correct the variable HF_ENDPOINT")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("huggingface_hub", "huggingface-hub is not installed; run python -m pip install huggingface-hub"),
        ("huggingface_hub.file_download", "installed but cannot be imported .*--force-reinstall huggingface-hub"),
        ("filelock", "installed but cannot be imported .*--force-reinstall huggingface-hub"),
    ],
)
def test_a_library_that_is_missing_or_broken(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, words: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module, None)
        refused(tmp_path / "new", words)
    assert left(tmp_path) == []  # not even the folder
    assert resolve(tmp_path / "new").read_bytes() == CONTENT


def test_nobody_answers(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    refused(tmp_path, "HF_ENDPOINT")


def test_nowhere_to_put_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(
        UserError, match="^checkpoint: .* is not a folder .(File exists|Not a directory).*; rename the file"
    ):
        hub.resolve("mar-base", "mar", [], tmp_path / "file")


def start_another(folder: Path) -> int:
    """A process that downloads the file slowly, as the number of its process; it ends with 0."""
    child = os.fork()
    if not child:
        code = 1
        try:
            timeouts.forked(60)
            code = resolve(folder).read_bytes() != CONTENT
        finally:
            os._exit(code)
    while not hidden(folder):
        time.sleep(0.01)
    return child


@forked
def test_two_processes(server: Server, tmp_path: Path) -> None:
    server.drip = 0.05
    child = start_another(tmp_path)
    refused(tmp_path, "another process is downloading it; wait for that to end")
    assert os.waitpid(child, 0)[1] == 0
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]


@forked
def test_killed_and_started_again(server: Server, tmp_path: Path) -> None:
    server.hold_at = 9000  # more than a buffer holds
    child = start_another(tmp_path)
    while hidden(tmp_path)[0].stat().st_size < 8000:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (part,) = hidden(tmp_path)
    assert CONTENT.startswith(part.read_bytes()) and not (tmp_path / NAME).exists()
    server.hold_at = None
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert any((wanted or "").startswith("bytes=") for wanted in server.ranges()), "it went on, not from the start"


def test_wrong_bytes_of_the_right_length(server: Server, tmp_path: Path) -> None:
    server.sends = WRONG
    text = refused(tmp_path, "sha256 than the server states .* was deleted")
    assert left(tmp_path) == [] and "may name a mirror" not in text
    server.sends = CONTENT
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_pinned_digest_and_revision(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.etag = "5f3759df-1"  # small files have no digest on the server
    for at in (0, 17, 63):  # every digit counts
        other = DIGEST[:at] + ("0" if DIGEST[at] != "0" else "1") + DIGEST[at + 1 :]
        monkeypatch.setattr(hub, "_catalogue", lambda other=other: (entry(sha256=other),))
        refused(tmp_path, "sha256 than the file of the catalogue .* was deleted")
        assert left(tmp_path) == []
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(sha256=DIGEST, revision="a" * 40),))
    assert hub.menu("mar", []) == ["mar-base (download 10 kB)"]
    path = resolve(tmp_path)
    assert path.read_bytes() == CONTENT and server.requests[-1][1].endswith(f"/resolve/{'a' * 40}/{NAME}")


def whole_folder(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    tar = entry(id="tar", family="tar", file="Tar", size=2 * len(CONTENT), decoder=None, parts=dict.fromkeys(parts))
    monkeypatch.setattr(hub, "_catalogue", lambda: (tar,))


def test_every_part_of_a_folder_is_checked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_folder(monkeypatch, "config.json", "w.bin")
    seen: list[tuple[int, int]] = []

    def get() -> Path:
        return hub.resolve("tar", "tar", [tmp_path], tmp_path, lambda done, total: seen.append((done, total)))

    assert get() == tmp_path / "Tar"
    assert seen[-1] == (2 * len(CONTENT), 2 * len(CONTENT)) and seen == sorted(seen)
    (tmp_path / "Tar" / "w.bin").unlink()
    server.requests.clear()
    seen.clear()
    folders = [tmp_path / "none", tmp_path]
    for choice in ("tar", "tar (download 20 kB)", "Tar"):
        assert hub.resolve(choice, "tar", folders, tmp_path, lambda *n: seen.append(n)) == tmp_path / "Tar"
        assert {path for _, path, _ in server.requests} == {f"/{REPO}/resolve/main/w.bin"}, "what is missing"
        assert seen[0][0] >= len(CONTENT) and seen[-1] == (2 * len(CONTENT), 2 * len(CONTENT))
    (tmp_path / "Tar" / "config.json").unlink()
    server.sends = WRONG
    with pytest.raises(UserError, match="^checkpoint: config.json could not be downloaded"):
        get()


def test_an_optional_part_is_skipped_only_if_it_does_not_exist(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_folder(monkeypatch, "extra.json?")
    server.status = 500
    with pytest.raises(UserError, match="^checkpoint: extra.json .*500"):
        hub._fetch(hub.entries("tar")[0], tmp_path, "checkpoint", None)
    server.status = 404
    assert hub._fetch(hub.entries("tar")[0], tmp_path, "checkpoint", None) == tmp_path / "Tar"
    whole_folder(monkeypatch, "extra.json")
    with pytest.raises(hub.Missing):
        hub._fetch(hub.entries("tar")[0], tmp_path, "checkpoint", None)


def janus_of_unknown_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry like Janus-4o-7B, of which no record names the files of the weights."""
    parts = dict.fromkeys(("config.json", "model.safetensors.index.json?", "model.safetensors?"))
    janus = entry(id="janus-4o-7b", family="janus", file="Janus-4o-7B", size=None, decoder=None, parts=parts)
    monkeypatch.setattr(hub, "_catalogue", lambda: (janus,))


def test_shards_are_those_that_the_index_names(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    janus_of_unknown_files(monkeypatch)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    monkeypatch.setitem(HELD, ".json", json.dumps(index).encode().ljust(10_000))

    def get(choice: str = "janus-4o-7b") -> list[str]:
        folder = hub.resolve(choice, "janus", [tmp_path], tmp_path)
        assert folder == tmp_path / "Janus-4o-7B"
        return sorted(path.name for path in folder.iterdir())

    server.lacks = "model.safetensors"
    everything = ["config.json", *names, "model.safetensors.index.json"]
    assert get() == everything
    server.requests.clear()
    assert get() == everything and not server.requests

    # A shard that is missing is downloaded, whatever the entry is called in the graph.
    for choice in ("janus-4o-7b", "Janus-4o-7B"):
        (tmp_path / "Janus-4o-7B" / names[1]).unlink()
        server.requests.clear()
        assert get(choice) == everything
        assert names[1] in {Path(path).name for _, path, _ in server.requests}

    # An index that leads elsewhere downloads nothing.
    shutil.rmtree(tmp_path / "Janus-4o-7B")
    monkeypatch.setitem(HELD, ".json", b'{"weight_map": {"a": "../x.safetensors"}}'.ljust(10_000))
    with pytest.raises(UserError, match="^checkpoint: model.safetensors.index.json .*does not name weight files"):
        get()
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == []


def test_a_single_file_takes_the_place_of_an_index(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    janus_of_unknown_files(monkeypatch)
    server.lacks = "model.safetensors.index.json"
    folder = hub.resolve("janus-4o-7b", "janus", [tmp_path], tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    server.requests.clear()
    assert hub.resolve("janus-4o-7b", "janus", [tmp_path], tmp_path) == folder and not server.requests


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import checkout  # the package under its name
from fastar_nodes.model_loaders import hub
folder, early = Path(sys.argv[2]), "huggingface_hub" in sys.modules
try:
    found = str(hub.resolve("kl16", "kl", [folder], folder))
except ValueError as e:
    found = str(e)
print(json.dumps([early, found]))
"""


@pytest.mark.slow
def test_offline_by_environment(root: Path, tmp_path: Path, server: Server) -> None:
    """In a fresh interpreter, where huggingface_hub reads its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "PROXY" not in k.upper()}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": server.url}
    command = [sys.executable, "-c", SCRIPT, str(root / "tests" / "lib"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    early, said = json.loads(done.stdout)
    assert not early and not server.requests
    assert said.startswith("decoder: kl16.safetensors ") and "HF_HUB_OFFLINE" in said
    assert f"https://huggingface.co/{REPO}" in said and str(tmp_path) in said
