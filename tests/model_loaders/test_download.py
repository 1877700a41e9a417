"""Downloads from a server on this machine: resumed, checked, and refused in one sentence."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import download as transfer
from fastar_nodes.model_loaders import hub

REPO = "jadechoghari/mar"


def resolve(choice: str, folder: Path, progress=None) -> Path:
    return hub.resolve(choice, "mar", [folder], folder, progress)


CONTENT = bytes(range(256)) * 40


class Server(http.server.ThreadingHTTPServer):
    """A model hub that holds CONTENT under every name; ``requests`` collects (method, path, headers)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, dict]] = []
        self.status = 200
        self.redirects = False
        self.sends = CONTENT
        self.pause_after: int | None = None
        self.break_at: int | None = None  # closes the connection at this byte of the file
        self.drip = 0.0  # seconds between 500 bytes
        self.etag = hashlib.sha256(CONTENT).hexdigest()
        self.go_on = threading.Event()
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
            cut = server.pause_after if server.pause_after is not None else len(body)
            if server.break_at is not None and begin < server.break_at:
                body = body[: server.break_at - begin]
                self.close_connection = True
            try:
                while server.drip and body:
                    self.wfile.write(body[:500])
                    body = body[500:]
                    time.sleep(server.drip)
                self.wfile.write(body[:cut])
                self.wfile.flush()
                if server.pause_after is not None:
                    server.go_on.wait(20)
                self.wfile.write(body[cut:])
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
    entry = hub.Entry("mar-base", "mar", "mar-base.safetensors", REPO, None, len(CONTENT) - 64, None, "MIT", "kl16")
    monkeypatch.setattr(hub, "_catalogue", lambda: (entry,))
    yield running
    running.go_on.set()
    running.shutdown()
    running.server_close()


def hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob(".*.part"))


def test_download(server: Server, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    seen: list[tuple[int, int]] = []
    target = tmp_path / "models" / "fastar"
    path = resolve("mar-base (download 832 MB)", target, progress=lambda done, total: seen.append((done, total)))
    assert path == target / "mar-base.safetensors" and path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and all(done <= total for done, total in seen)
    assert [path for _, path, _ in server.requests] == [f"/{REPO}/resolve/main/mar-base.safetensors"] * 2
    assert not hidden(target) and "mar-base" not in capfd.readouterr().err
    asked = len(server.requests)
    assert resolve("mar-base", target) == path
    assert len(server.requests) == asked


def test_an_interrupted_download_goes_on(server: Server, tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= 2000:
            raise Interrupt

    server.pause_after = 2500
    begin = time.monotonic()
    with pytest.raises(Interrupt):
        resolve("mar-base", tmp_path, progress=stop)
    assert time.monotonic() - begin < 5  # although the server has gone silent
    (part,) = hidden(tmp_path)
    assert part.read_bytes() == CONTENT[:2000] and not (tmp_path / "mar-base.safetensors").exists()
    server.pause_after = None
    server.go_on.set()
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=2000-"] and not hidden(tmp_path)


def test_a_part_of_another_version_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".mar-base.safetensors.0123456789abcdef.part").write_bytes(b"old")
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None] and not hidden(tmp_path)


def test_a_token_stays_with_the_hub(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    server.redirects = True  # large files lie on another host
    assert resolve("mar-base", tmp_path).read_bytes() == CONTENT
    told = [(path, headers.get("authorization")) for _, path, headers in server.requests]
    assert told[0][1] == "Bearer hf_test" and told[-1] == ("/storage/resolve/", None)


def test_no_room(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 0, 9000))
    with pytest.raises(UserError, match="it needs 10 kB and the disk has 9 kB free"):
        resolve("mar-base", tmp_path)


def test_what_arrives_is_compared_with_what_was_announced(server: Server, tmp_path: Path) -> None:
    server.sends = CONTENT[:-1] + b"!"
    with pytest.raises(UserError, match="what arrived is not the file that was announced.*put it into"):
        resolve("mar-base", tmp_path)
    server.sends = CONTENT[:5000]
    with pytest.raises(UserError, match="offers 5000 bytes instead of about 10176"):
        resolve("mar-base", tmp_path)
    assert not hidden(tmp_path) and not (tmp_path / "mar-base.safetensors").exists()


@pytest.mark.parametrize(("status", "words"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "404"), (500, "500")])
def test_refused(server: Server, tmp_path: Path, status: int, words: str) -> None:
    server.status = status
    with pytest.raises(UserError) as error:
        resolve("mar-base", tmp_path)
    text = str(error.value)
    assert text.startswith(f"checkpoint: mar-base.safetensors could not be downloaded from {server.url}/{REPO} (")
    assert words in text and f"get it from https://huggingface.co/{REPO} and put it into {tmp_path}" in text
    assert "\n" not in text


def test_nobody_answers(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.shutdown()
    monkeypatch.setattr(transfer, "CONNECT_SECONDS", 0.5)
    with pytest.raises(UserError, match="no connection: no answer within|no connection"):
        resolve("mar-base", tmp_path)


def test_two_at_once(server: Server, tmp_path: Path) -> None:
    filelock = pytest.importorskip("filelock")
    with filelock.FileLock(tmp_path / ".mar-base.safetensors.lock"):
        held = threading.Thread(target=lambda: errors.append(pytest.raises(UserError, resolve, "mar-base", tmp_path)))
        errors: list = []
        held.start()
        held.join()
    assert "is already being downloaded" in str(errors[0].value)


def test_nowhere_to_put_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UserError, match="could not be written to .*get it from"):
        hub.resolve("mar-base", "mar", [], tmp_path / "file")


SCRIPT = """
import importlib.util, json, sys, time
from pathlib import Path
root, folder = map(Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location(
    "fastar_nodes", root / "__init__.py", submodule_search_locations=[str(root)]
)
sys.modules["fastar_nodes"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["fastar_nodes"])
from fastar_nodes.model_loaders import hub
early = "huggingface_hub" in sys.modules
begin = time.monotonic()
try:
    found = str(hub.resolve("kl16", "kl", [folder], folder))
except ValueError as e:
    found = str(e)
print(json.dumps([early, found, time.monotonic() - begin]))
"""


def run(root: Path, folder: Path, **environment: str) -> tuple[bool, str, float]:
    """Resolve kl16 in a fresh interpreter, where huggingface_hub reads its environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "PROXY" not in k.upper()}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), str(folder)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return tuple(json.loads(out.stdout))


@pytest.mark.slow
def test_offline_by_environment(root: Path, tmp_path: Path, server: Server) -> None:
    early, said, seconds = run(root, tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT=server.url)
    assert not early and seconds < 30 and not server.requests
    assert said.startswith("decoder: kl16.safetensors could not be downloaded") and "HF_HUB_OFFLINE is set" in said
    assert f"get it from https://huggingface.co/{REPO} and put it into {tmp_path}" in said


@pytest.mark.slow
def test_endpoint_and_token_by_environment(root: Path, tmp_path: Path, server: Server) -> None:
    _, said, _ = run(root, tmp_path, HF_ENDPOINT=server.url, HF_TOKEN="hf_test")
    assert "offers 10240 bytes instead of about 265824076" in said  # so it asked the right server
    method, path, headers = server.requests[0]
    assert (method, path) == ("HEAD", f"/{REPO}/resolve/main/kl16.safetensors")
    assert headers["authorization"] == "Bearer hf_test"


@pytest.mark.slow
def test_no_route_by_environment(root: Path, tmp_path: Path) -> None:
    _, said, seconds = run(root, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "no connection" in said and seconds < 60
