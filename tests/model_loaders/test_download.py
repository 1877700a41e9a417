"""Downloads from a server on this machine, with faults: each ends in the whole file or in one sentence, and the next
completes it. Files that are in the cache of huggingface-hub are used.
"""

import errno
import hashlib
import http.server
import io
import json
import os
import shutil
import sys
import threading
import time
import traceback
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import timeouts
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub, transfer
from fastar_nodes.model_loaders.files.checkpoint import member

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

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


class Lost(TimeoutError):
    """One that the libraries would take for a fault of the connection."""


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
                self.connection.recv(1)  # nothing, when the client has hung up
                return
            while server.drip and body:
                self.wfile.write(body[:500])
                body = body[500:]
                time.sleep(server.drip)
            self.wfile.write(body)
        except OSError:  # the client has hung up
            pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """A running :class:`Server` that huggingface_hub takes for its hub, with a catalogue size to match."""
    running = Server()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    point_to(running.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 60)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    # It waits a second before it asks again.
    at_once = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.file_download.time", at_once)
    monkeypatch.setattr(hub, "catalogue", lambda: (entry(),))
    yield running
    running.shutdown()
    running.server_close()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an address the hub of huggingface_hub, as HF_ENDPOINT does before it is imported."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Before 1.0 that module kept copies.
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


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


def eventually(folder: Path) -> Path:
    """A download that may end in a sentence once, after which the next completes."""
    try:
        return resolve(folder)
    except UserError:
        return resolve(folder)


def test_download(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    target = tmp_path / "models" / "fastar"
    path = resolve(target, progress=lambda done, total: seen.append((done, total)))
    assert path == target / NAME and path.read_bytes() == CONTENT
    assert [done for done, _ in seen[1:11]] == [1000 * n for n in range(1, 11)], "after every chunk"
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and all(total == len(CONTENT) for _, total in seen[1:])
    assert [path for _, path, _ in server.requests] == [f"/{REPO}/resolve/main/{NAME}"] * 2
    assert left(target) == [NAME]
    asked = len(server.requests)
    assert resolve(target) == path and len(server.requests) == asked


def cancelled_at(folder: Path, count: int, kind: type[Exception] = Interrupt) -> None:
    """Cancel a download when so many bytes have arrived."""

    def stop(done: int, total: int) -> None:
        if done == count:
            raise kind("stop")

    with pytest.raises(kind, match="^stop$"):
        resolve(folder, progress=stop)


@pytest.mark.parametrize("kind", [Interrupt, Lost, UserError])
def test_a_cancelled_download_goes_on(server: Server, tmp_path: Path, kind: type[Exception]) -> None:
    cancelled_at(tmp_path, 2000, kind)
    (part,) = hidden(tmp_path)
    assert part.read_bytes() == CONTENT[:2000] and left(tmp_path) == [part.name]
    assert hub.absent("mar-base", "mar", [tmp_path]) is not None and transfer.arrived(tmp_path / NAME) == 2000
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=2000-"] and left(tmp_path) == [NAME]


def test_cancelling_the_verification_keeps_what_has_arrived(server: Server, tmp_path: Path) -> None:
    cancelled_at(tmp_path, len(CONTENT))
    assert not (tmp_path / NAME).exists() and transfer.arrived(tmp_path / NAME) == len(CONTENT)
    server.requests.clear()
    assert resolve(tmp_path).read_bytes() == CONTENT and server.ranges() == [], "it is only verified"


# ------------------------------------------------------------------------------------------------ partial files


def test_only_the_parts_of_another_version_are_deleted(server: Server, tmp_path: Path) -> None:
    other = f".{NAME}.index.json.0123456789abcdef.part"
    for name in (f".{NAME}.0123456789abcdef.part", other):
        (tmp_path / name).write_bytes(b"old")
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None] and left(tmp_path) == [other, NAME]


def test_a_name_is_no_pattern(server: Server, tmp_path: Path) -> None:
    """An index may name model-*.safetensors."""
    kept = tmp_path / ".model-00001.safetensors.0123456789abcdef.part"
    kept.write_bytes(b"of another shard")
    remote = transfer.Remote(REPO, "model-*.safetensors", None, None, None)
    transfer.download(remote, tmp_path / "model-*.safetensors", "checkpoint", lambda *_: None)
    assert (tmp_path / "model-*.safetensors").read_bytes() == CONTENT and kept.exists()
    assert transfer.arrived(tmp_path / "model-[0-9]*.safetensors") == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("ending", [f"{DIGEST[:16]}.part", "lock"])
def test_nothing_is_written_through_a_link_and_no_pipe_is_waited_for(
    server: Server, tmp_path: Path, ending: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    models = tmp_path / "models"
    models.mkdir()
    at = models / f".{NAME}.{ending}"

    at.symlink_to(precious)
    assert resolve(models).read_bytes() == CONTENT and left(models) == [NAME]
    assert precious.read_bytes() == b"precious"

    (models / NAME).unlink()
    os.mkfifo(at)
    assert resolve(models).read_bytes() == CONTENT and left(models) == [NAME]


@pytest.mark.parametrize("ranges_are", ["ignored", "refused", "elsewhere"])
def test_a_part_that_the_server_does_not_continue(server: Server, tmp_path: Path, ranges_are: str) -> None:
    part_of(tmp_path, CONTENT[:4000])
    server.ranges_are = ranges_are
    assert eventually(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges()[0] == "bytes=4000-"


def test_a_part_that_is_too_long_starts_again(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path, CONTENT + b"x")
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == [None]


def test_a_part_that_is_complete_is_only_verified(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path, CONTENT)
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == []


@pytest.mark.parametrize("length", [4000, 10_000])
def test_a_part_with_a_wrong_bit_is_deleted(server: Server, tmp_path: Path, length: int) -> None:
    part_of(tmp_path, WRONG[:100] + b"!" + WRONG[101:length])
    assert "the server states" in refused(tmp_path) and left(tmp_path) == []
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_part_of_unknown_content_is_not_continued(server: Server, tmp_path: Path) -> None:
    """Nothing tells whether it belongs to the file that a mirror without digests offers."""
    part_of(tmp_path, CONTENT[:4000])
    (tmp_path / f".{NAME}.unknown.part").write_bytes(b"other")
    server.etag = ""
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]
    assert server.ranges() == [None]


# ------------------------------------------------------------------------------------------------ what is not the file


def test_a_login_page_is_no_model(server: Server, tmp_path: Path) -> None:
    """It answers 200 to everything."""
    server.sends, server.etag = PAGE, ""
    text = refused(tmp_path, "is a web page, so FastAR deleted it")
    assert "log in" in text and "HF_ENDPOINT" not in text
    assert left(tmp_path) == []
    server.sends, server.etag = None, None
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("name", list(HELD))
def test_every_type_without_a_digest(server: Server, tmp_path: Path, name: str) -> None:
    """A file of safetensors may begin with the first character of a page."""
    server.etag = ""
    transfer.download(transfer.Remote(REPO, f"x{name}", None, None, None), tmp_path / "x", "model", lambda *_: None)
    assert (tmp_path / "x").read_bytes() == HELD[name]
    (tmp_path / "x").unlink()
    server.sends = b""
    with pytest.raises(UserError, match="^model: x could not be downloaded: the data from 127.0.0.1:.* is empty"):
        transfer.download(transfer.Remote(REPO, f"x{name}", None, None, None), tmp_path / "x", "model", lambda *_: None)
    assert left(tmp_path) == []


@pytest.mark.parametrize("states_length", [True, False])
def test_no_more_than_promised_is_kept(server: Server, tmp_path: Path, states_length: bool) -> None:
    """The server promises 10 kB and sends 30 MB."""
    server.sends, server.promises, server.states_length = CONTENT + bytes(30_000_000), len(CONTENT), states_length
    largest = 0

    def watch(done: int, total: int) -> None:
        nonlocal largest
        largest = max(largest, done)

    with pytest.raises(UserError, match="checkpoint: .*sent more than the (10000|10500) bytes"):
        resolve(tmp_path, watch)
    assert largest <= 10_500 and left(tmp_path) == []


def test_without_a_stated_length_the_catalogue_is_the_limit(server: Server, tmp_path: Path) -> None:
    server.states_length = False
    assert resolve(tmp_path).read_bytes() == CONTENT
    (tmp_path / NAME).unlink()
    server.sends, server.etag = CONTENT + bytes(600), ""
    refused(tmp_path, "more than the 10500 bytes")
    assert left(tmp_path) == []


def test_wrong_bytes_of_the_right_length(server: Server, tmp_path: Path) -> None:
    server.sends = WRONG
    text = refused(tmp_path, "the sha256 .* the server states, so FastAR deleted it")
    assert left(tmp_path) == [] and "may name a mirror" not in text
    server.sends = CONTENT
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_pinned_digest_and_revision(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.etag = "5f3759df-1"  # small files have no digest on the server
    for at in (0, 17, 63):  # every digit counts
        other = DIGEST[:at] + ("0" if DIGEST[at] != "0" else "1") + DIGEST[at + 1 :]
        monkeypatch.setattr(hub, "catalogue", lambda other=other: (entry(sha256=other),))
        refused(tmp_path, "the sha256 .* the catalogue states, so FastAR deleted it")
        assert left(tmp_path) == []
    monkeypatch.setattr(hub, "catalogue", lambda: (entry(sha256=DIGEST, revision="a" * 40),))
    assert hub.menu("mar", []) == ["mar-base (download 10 kB)"]
    path = resolve(tmp_path)
    assert path.read_bytes() == CONTENT and server.requests[-1][1].endswith(f"/resolve/{'a' * 40}/{NAME}")


# ------------------------------------------------------------------------------------------------ causes


def test_a_token_stays_with_the_hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server.redirects = True  # large files lie on another host
    assert resolve(tmp_path).read_bytes() == CONTENT
    told = [(path, headers.get("authorization")) for _, path, headers in server.requests]
    assert told[0][1] == "Bearer hf_test" and told[-1] == (f"/storage/{REPO}/resolve/main/{NAME}", None)


def test_a_token_that_is_refused(server: Server, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    server.accepts_token = False
    text = refused(tmp_path, "status 401")
    assert "a valid token" in text and "hf_expired" not in text


def faults(server: Server) -> dict[str, Callable[[], None]]:
    """Ways in which a server can fail, by what the message says."""

    def silent() -> None:
        server.hold_at = 3000

    def page() -> None:
        server.sends, server.etag, server.promises = PAGE, "", None

    def closed() -> None:
        server.shutdown()
        server.server_close()

    return {
        "status 401": lambda: setattr(server, "status", 401),
        "status 404": lambda: setattr(server, "status", 404),
        "status 429": lambda: setattr(server, "status", 429),
        "status 503": lambda: setattr(server, "status", 503),
        "is a web page": page,
        "more than the": lambda: setattr(server, "sends", CONTENT * 2),
        "has the sha256": lambda: setattr(server, "sends", WRONG),
        "timed out": silent,
        "transfer from": closed,
    }


@pytest.mark.parametrize("words", list(faults(None)))
def test_a_password_in_the_endpoint_is_not_shown(
    server: Server, tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture, words: str
) -> None:
    """Neither in the message nor in the traceback that ComfyUI logs."""
    point_to(server.url.replace("//", "//user:s3cret@"), monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    server.promises = len(CONTENT)
    faults(server)[words]()
    with pytest.raises(UserError, match=words) as problem:
        resolve(tmp_path)
    shown = "".join(traceback.format_exception(problem.value))
    assert "s3cret" not in shown and "user" not in str(problem.value)
    assert not any("s3cret" in record.getMessage() for record in caplog.records if record.name == "root")


@pytest.mark.skipif(huggingface_hub.__version__ < "1", reason="reads the variables once")
@pytest.mark.parametrize("proxy", ["user:s3cret@127.0.0.1:9", "http://user:s3cret@127.0.0.1:9", "htp://user:s3cret@x"])
def test_a_password_of_a_proxy_is_not_shown(server: Server, tmp_path: Path, monkeypatch, proxy: str) -> None:
    try:
        with monkeypatch.context() as patched:
            patched.setenv("http_proxy", proxy)
            patched.setenv("no_proxy", "")
            huggingface_hub.close_session()  # the next one reads the variables again
            assert "s3cret" not in refused(tmp_path, "the transfer from .* failed .*check the network, HTTPS_PROXY")
    finally:
        huggingface_hub.close_session()


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_a_refusal(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    text = refused(tmp_path, str(status))
    assert ("HF_TOKEN" in text) is (status in (401, 403))
    assert f"https://huggingface.co/{REPO}" in text and str(tmp_path) in text


def test_no_room(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 0, 9000))
    text = refused(tmp_path, "10 kB, .* 9 kB are free on the disk")
    assert "HF_ENDPOINT" not in text and left(tmp_path) == []
    part_of(tmp_path, CONTENT[:2000])  # what is there counts
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written(server: Server, tmp_path: Path, monkeypatch, number: int) -> None:
    def write(part: transfer._Part, chunk: bytes) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(transfer._Part, "write", write)
        text = refused(tmp_path, f"FastAR cannot write to .* .{os.strerror(number)}")
    assert "HF_ENDPOINT" not in text and "HF_TOKEN" not in text
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("module", ["huggingface_hub", "huggingface_hub.file_download", "filelock"])
def test_a_library_that_is_missing_or_broken(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module, None)
        refused(tmp_path, "huggingface-hub cannot be imported .*run python -m pip install .*huggingface-hub")
    assert left(tmp_path) == []
    assert resolve(tmp_path).read_bytes() == CONTENT


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
    refused(tmp_path, "another process is downloading this file; wait until it has finished")
    assert os.waitpid(child, 0)[1] == 0
    assert resolve(tmp_path).read_bytes() == CONTENT and left(tmp_path) == [NAME]


# ------------------------------------------------------------------------------------------------ the cache


def in_cache(name: str = NAME, content: bytes = CONTENT, revision: str = "1" * 40, repo: str = REPO) -> Path:
    """A file in the cache of huggingface-hub, as a download of the newest version leaves it."""
    place = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    blob = place / "blobs" / hashlib.sha256(content).hexdigest()
    path = place / "snapshots" / revision / name
    for folder in (blob.parent, path.parent, place / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(revision)
    blob.write_bytes(content)
    path.symlink_to(os.path.relpath(blob, path.parent))
    return path


@pytest.mark.parametrize("choice", ["mar-base", "mar-base (download 10 kB)", NAME, f"sub/{NAME}"])
def test_a_file_in_the_cache_is_used_where_it_is(server: Server, tmp_path: Path, choice: str) -> None:
    path = in_cache()
    assert hub.absent(choice, "mar", [tmp_path]) is None
    assert hub.resolve(choice, "mar", [tmp_path], tmp_path) == path
    assert not server.requests and left(tmp_path) == []
    (tmp_path / NAME).write_bytes(b"the user's own")
    assert resolve(tmp_path) == tmp_path / NAME, "a model folder comes first"


@pytest.mark.parametrize("linked", [True, False])
def test_a_pinned_file_in_the_cache_must_have_its_digest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """Its revision need not be the catalogue's. Without links, as on Windows, the cache holds copies."""
    monkeypatch.setattr(hub, "catalogue", lambda: (entry(sha256=DIGEST, revision="a" * 40),))
    path = in_cache(content=WRONG)
    if not linked:
        path.unlink()
        path.write_bytes(WRONG)
    assert hub.absent("mar-base", "mar", [tmp_path]).id == "mar-base"
    assert resolve(tmp_path) == tmp_path / NAME and server.requests

    (tmp_path / NAME).unlink()
    path.unlink()
    path = in_cache()
    if not linked:
        path.unlink()
        path.write_bytes(CONTENT)
    assert resolve(tmp_path) == path and left(tmp_path) == []


def test_the_catalogues_revision_comes_first(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "catalogue", lambda: (entry(revision="a" * 40),))
    newest = in_cache(content=WRONG, revision="b" * 40)
    assert resolve(tmp_path) == newest
    pinned = in_cache(revision="a" * 40)
    (newest.parents[2] / "refs" / "main").write_text("b" * 40)
    assert resolve(tmp_path) == pinned


def test_a_blob_that_all_models_share(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named by another digest, and a link leads to it from the model's own blobs."""
    monkeypatch.setattr(hub, "catalogue", lambda: (entry(sha256=DIGEST),))
    path = in_cache()
    blob = path.resolve()
    shared = Path(constants.HF_HUB_CACHE) / "blobs" / "ff" / ("f" * 64)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert resolve(tmp_path) == path and member(path, "checkpoint") == path
    shared.unlink()
    assert resolve(tmp_path) == tmp_path / NAME


def test_a_folder_in_the_cache_is_used_if_it_is_whole(server: Server, tmp_path: Path, monkeypatch) -> None:
    whole_folder(monkeypatch, "config.json", "w.bin", "extra.json?")
    config = in_cache("config.json", HELD[".json"])
    assert hub.absent("tar", "tar", [tmp_path]).id == "tar"
    weights = in_cache("w.bin", HELD[".bin"])
    assert hub.absent("tar", "tar", [tmp_path]) is None
    assert hub.resolve("Tar", "tar", [tmp_path], tmp_path) == weights.parent and not server.requests

    # What is there of one that is not whole is copied, and the rest downloaded.
    config.unlink()
    seen: list[int] = []
    folder = hub.resolve("tar", "tar", [tmp_path], tmp_path, lambda done, total: seen.append(done))
    assert left(folder) == ["config.json", "extra.json", "w.bin"]
    assert {Path(path).name for _, path, _ in server.requests} == {"config.json", "extra.json"}
    assert (folder / "w.bin").read_bytes() == HELD[".bin"] and not (folder / "w.bin").is_symlink()
    assert seen == sorted(seen) and seen[-1] >= len(HELD[".json"]) + len(HELD[".bin"])


@pytest.mark.skipif(huggingface_hub.__version__ < "1", reason="reads the variable once")
def test_offline_the_cache_is_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_folder(monkeypatch, "config.json", "w.bin")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    in_cache("config.json", HELD[".json"])
    with pytest.raises(UserError, match="^checkpoint: w.bin could not be downloaded: HF_HUB_OFFLINE is set") as problem:
        hub.resolve("tar", "tar", [tmp_path], tmp_path)
    assert "the Hugging Face cache does not hold this file; unset this variable" in str(problem.value)
    in_cache("w.bin", HELD[".bin"])
    assert hub.resolve("tar", "tar", [tmp_path / "none"], tmp_path / "none").is_dir() and not server.requests


# ------------------------------------------------------------------------------------------------ several files


def whole_folder(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    tar = entry(id="tar", family="tar", file="Tar", size=2 * len(CONTENT), decoder=None, parts=dict.fromkeys(parts))
    monkeypatch.setattr(hub, "catalogue", lambda: (tar,))


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
    monkeypatch.setattr(hub, "catalogue", lambda: (janus,))


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
    with pytest.raises(UserError, match="^checkpoint: model.safetensors.index.json .*must name weight files"):
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
