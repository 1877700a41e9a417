"""Downloads from a server on this machine, with faults: each ends in the whole file or in one sentence, and the next completes it."""

import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import timeouts
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub

REPO, NAME = "jadechoghari/mar", "mar-base.safetensors"
CONTENT = bytes(range(256)) * 40
WRONG = CONTENT[:5000] + b"!" + CONTENT[5001:]
DIGEST = hashlib.sha256(CONTENT).hexdigest()
forked = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Interrupt(Exception):
    """What a cancelled run raises in the progress function."""


def stop_at(count: int):
    """A progress function that cancels the download after so many bytes."""

    def stop(done: int, total: int) -> None:
        if done >= count:
            raise Interrupt

    return stop


def resolve(folder: Path, progress=None) -> Path:
    return hub.resolve("mar-base", "mar", [folder], folder, progress)


def entry(**changes: object) -> hub.Entry:
    fields = {"id": "mar-base", "family": "mar", "file": NAME, "repo": REPO, "revision": None}
    fields |= {"size": len(CONTENT), "sha256": None, "licence": "MIT", "decoder": "kl16"}
    return hub.Entry(**{**fields, **changes})


def refused(folder: Path, words: str = ": ") -> str:
    with pytest.raises(UserError, match=words) as error:
        resolve(folder)
    text = str(error.value)
    assert text.startswith(f"checkpoint: {NAME}") and "\n" not in text and len(text) <= 400
    return text


class Server(http.server.ThreadingHTTPServer):
    """A model hub that holds CONTENT under every name; ``requests`` collects (method, path, headers)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, dict]] = []
        self.status = 200
        self.redirects = False
        self.sends = CONTENT
        self.break_at: int | None = None  # closes the connection at this byte of the file
        self.drip = 0.0  # seconds between 500 bytes
        self.etag = DIGEST
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
        wanted = self.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if server.redirects and self.command == "GET" and not self.path.startswith("/storage"):
            self.send_response(302)
            self.send_header("Location", f"{server.url.replace('127.0.0.1', 'localhost')}/storage/resolve/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = server.sends[begin:] if server.status == 200 else b""
        self.send_response(206 if wanted and server.status == 200 else server.status)
        self.send_header("ETag", f'"{server.etag}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(server.sends) - 1}/{len(server.sends)}")
        self.end_headers()
        if self.command == "GET":
            if server.break_at is not None and begin < server.break_at:
                body = body[: server.break_at - begin]
                self.close_connection = True
            try:
                while server.drip and body:
                    self.wfile.write(body[:500])
                    body = body[500:]
                    time.sleep(server.drip)
                self.wfile.write(body)
            except OSError:
                pass


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
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    # Before 1.0 that module kept copies.
    monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", address, raising=False)
    monkeypatch.setattr("huggingface_hub.file_download.DOWNLOAD_CHUNK_SIZE", 1000, raising=False)
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(),))
    yield running
    running.shutdown()
    running.server_close()


def hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.part"))


def test_download(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    target = tmp_path / "models" / "fastar"
    path = resolve(target, progress=lambda done, total: seen.append((done, total)))
    assert path == target / NAME and path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and all(done <= total for done, total in seen)
    assert [path for _, path, _ in server.requests] == [f"/{REPO}/resolve/main/{NAME}"] * 2
    assert not hidden(target)
    asked = len(server.requests)
    assert resolve(target) == path and len(server.requests) == asked


def test_an_interrupted_download_goes_on(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        resolve(tmp_path, progress=stop_at(2000))
    (part,) = hidden(tmp_path)
    assert part.read_bytes() == CONTENT[:2000] and not (tmp_path / NAME).exists()
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=2000-"] and not hidden(tmp_path)


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
    assert server.ranges() == [None] and not hidden(tmp_path)


def test_a_token_stays_with_the_hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server.redirects = True  # large files lie on another host
    assert resolve(tmp_path).read_bytes() == CONTENT
    told = [(path, headers.get("authorization")) for _, path, headers in server.requests]
    assert told[0][1] == "Bearer hf_test" and told[-1] == ("/storage/resolve/", None)


def test_no_room(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 0, 9000))
    refused(tmp_path, "10 kB .* 9 kB")
    (part,) = hidden(tmp_path)
    part.write_bytes(CONTENT[:2000])  # what is there counts
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up(server: Server, tmp_path: Path) -> None:
    part = tmp_path / f".{NAME}.{DIGEST[:16]}.part"
    part.symlink_to("/dev/full")
    refused(tmp_path, "No space left")
    part.unlink()
    assert resolve(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_refusal(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    text = refused(tmp_path, str(status))
    assert ("HF_TOKEN" in text) is (status in (401, 403))
    assert f"https://huggingface.co/{REPO}" in text and str(tmp_path) in text


def test_nobody_answers(server: Server, tmp_path: Path) -> None:
    server.shutdown()
    server.server_close()
    refused(tmp_path, "HF_ENDPOINT")


def test_nowhere_to_put_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UserError, match="^checkpoint: .*could not be downloaded .(File exists|Not a directory)"):
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
    while not any(part.stat().st_size >= 1000 for part in hidden(folder)):
        time.sleep(0.01)
    return child


@forked
def test_two_processes(server: Server, tmp_path: Path) -> None:
    server.drip = 0.05
    child = start_another(tmp_path)
    refused(tmp_path, "is already being downloaded")
    assert os.waitpid(child, 0)[1] == 0
    assert resolve(tmp_path).read_bytes() == CONTENT


@forked
def test_killed_and_started_again(server: Server, tmp_path: Path) -> None:
    server.drip = 0.05
    child = start_another(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (part,) = hidden(tmp_path)
    assert CONTENT.startswith(part.read_bytes()) and not (tmp_path / NAME).exists()
    server.drip = 0.0
    assert resolve(tmp_path).read_bytes() == CONTENT
    assert any((wanted or "").startswith("bytes=") for wanted in server.ranges()), "it went on, not from the start"


def test_wrong_bytes_of_the_right_length(server: Server, tmp_path: Path) -> None:
    server.sends = WRONG
    refused(tmp_path, "sha256")
    assert not hidden(tmp_path) and not list(tmp_path.glob("mar*"))
    server.sends = CONTENT
    assert resolve(tmp_path).read_bytes() == CONTENT


def test_a_pinned_digest_and_revision(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.etag = "5f3759df-1"  # small files have no digest on the server
    for at in (0, 17, 63):  # every digit counts
        other = DIGEST[:at] + ("0" if DIGEST[at] != "0" else "1") + DIGEST[at + 1 :]
        monkeypatch.setattr(hub, "_catalogue", lambda other=other: (entry(sha256=other),))
        refused(tmp_path, "sha256")
        assert not hidden(tmp_path) and not list(tmp_path.glob("mar*"))
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry(sha256=DIGEST, revision="a" * 40),))
    assert hub.menu("mar", []) == ["mar-base (download 10 kB)"]
    path = resolve(tmp_path)
    assert path.read_bytes() == CONTENT and server.requests[-1][1].endswith(f"/resolve/{'a' * 40}/{NAME}")


def whole_folder(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    tar = entry(id="tar", family="tar", file="Tar", size=2 * len(CONTENT), decoder=None, parts=parts)
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


SCRIPT = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest  # the package under its name
from fastar_nodes.model_loaders import hub
folder, early, begin = Path(sys.argv[2]), "huggingface_hub" in sys.modules, time.monotonic()
try:
    found = str(hub.resolve("kl16", "kl", [folder], folder))
except ValueError as e:
    found = str(e)
print(json.dumps([early, found, time.monotonic() - begin]))
"""


@pytest.mark.slow
def test_offline_by_environment(root: Path, tmp_path: Path, server: Server) -> None:
    """In a fresh interpreter, where huggingface_hub reads its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "PROXY" not in k.upper()}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": server.url}
    command = [sys.executable, "-c", SCRIPT, str(root / "tests"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    early, said, seconds = json.loads(done.stdout)
    assert not early and seconds < 30 and not server.requests
    assert said.startswith("decoder: kl16.safetensors ") and "HF_HUB_OFFLINE" in said
    assert f"https://huggingface.co/{REPO}" in said and str(tmp_path) in said
