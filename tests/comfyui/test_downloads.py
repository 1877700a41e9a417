"""Downloads by a node of a real server, from a model hub on this machine, and graphs that were saved elsewhere."""

import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfy_host import Comfy, Missing, Rejected, defaults

PAGE = b"<!doctype html><title>Log in to this network</title>"
FOLDER = "Janus-Pro-1B"
CHUNK = 10 << 20  # bytes that huggingface-hub reads at once
NAMES = ("config.json", "tokenizer.json", "pytorch_model.bin")
DEMO = Path(__file__).parents[2] / "demo" / "checkpoints"


class Hub(http.server.ThreadingHTTPServer):
    """Holds ``files`` by name, under every repository."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.page = False  # answers everything with a login page
        self.large = False  # sends a chunk and a half of a large file, waits for ``go_on``, and sends the rest
        self.waits, self.go_on, self.hung_up = threading.Event(), threading.Event(), threading.Event()
        self.sent: list[str] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, name = self.server, self.path.rpartition("/")[2]
        body = PAGE if hub.page else bytes(4 * CHUNK) if hub.large else hub.files.get(name)
        self.send_response(200 if body else 404)
        self.send_header("ETag", '"one"')
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command != "GET" or not body:
            return
        hub.sent.append(name)
        if not hub.large:
            self.wfile.write(body)
            return
        try:
            self.wfile.write(body[: CHUNK + CHUNK // 2])
            hub.waits.set()
            hub.go_on.wait(60)
            self.wfile.write(body[CHUNK + CHUNK // 2 :])
        except OSError:
            hub.hung_up.set()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    running = Hub()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of huggingface-hub."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def connected(hub: Hub, cache: Path) -> Iterator[Comfy]:
    """A server whose Hugging Face is ``hub``, without the model that it holds."""
    environment = {
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HUB_OFFLINE": "0",
    }
    try:
        server = Comfy(environment)
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        folder = models(server) / FOLDER
        for name in NAMES:
            hub.files[name] = (folder / name).read_bytes()
        for stand_in in models(server).iterdir():
            shutil.rmtree(stand_in)
        yield server


def models(comfy: Comfy) -> Path:
    return comfy.base / "models" / "fastar"


def load(comfy: Comfy, node: str, **inputs: Any) -> dict[str, Any]:
    """A graph that loads a model."""
    about = comfy.get(f"/object_info/{node}")[node]
    loader = {"class_type": node, "inputs": defaults(about, **inputs)}
    return {"1": loader, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_download_through_a_login_page_then_cancelled_then_whole(connected: Comfy, hub: Hub, cache: Path) -> None:
    folder = models(connected) / FOLDER
    prompt = load(connected, "FastARLoadJanus", checkpoint="janus-pro-1b", allow_download=True)

    # 1. A login page is no model, and leaves nothing behind.
    hub.page = True
    said = connected.complaint(prompt)
    assert said.startswith("checkpoint: config.json could not be downloaded: what 127.0.0.1:") and "a web page" in said
    assert left(folder) == []
    hub.page = False

    # 2. Cancelling ends with the chunk that is on its way; what has arrived is kept.
    hub.large = True
    entry = connected.queue(prompt)
    assert hub.waits.wait(60)
    connected.post("/interrupt", {})
    hub.go_on.set()
    assert connected.failure(connected.wait(entry)) == "interrupted"
    assert hub.hung_up.wait(60), "the rest was not received"
    (part,) = left(folder)
    assert part == ".config.json.one.part" and (folder / part).stat().st_size == 2 * CHUNK
    hub.large = False

    # 3. The whole model, without lock files or parts.
    connected.run(prompt)
    assert left(folder) == sorted(NAMES)
    assert all((folder / name).read_bytes() == hub.files[name] for name in NAMES)

    # 4. The entry has left the menu for its folder, and all that a graph may call it runs.
    menu = connected.get("/object_info/FastARLoadJanus")["FastARLoadJanus"]["input"]["required"]["checkpoint"][1]
    assert FOLDER in menu["options"] and not any("janus-pro-1b" in choice for choice in menu["options"])
    hub.sent.clear()
    for choice in ("janus-pro-1b", "janus-pro-1b (download 4.18 GB)", FOLDER, f"{FOLDER}\\pytorch_model.bin"):
        connected.run(load(connected, "FastARLoadJanus", checkpoint=choice))
    assert not hub.sent

    # 5. In the cache of huggingface-hub, where another program has put it, it is used without a download.
    snapshot = cache / "models--deepseek-ai--Janus-Pro-1B" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--deepseek-ai--Janus-Pro-1B" / "refs").mkdir()
    (cache / "models--deepseek-ai--Janus-Pro-1B" / "refs" / "main").write_text("1")
    for choice in ("janus-pro-1b", FOLDER):
        connected.run(load(connected, "FastARLoadJanus", checkpoint=choice))
    assert not hub.sent and not folder.exists()

    # 6. Half of it there is a download.
    (snapshot / "config.json").unlink()
    assert "allow_download" in connected.complaint(load(connected, "FastARLoadJanus", checkpoint="janus-pro-1b"))
    connected.run(prompt)
    assert hub.sent == ["config.json"] and left(folder) == sorted(NAMES)


def test_graphs_of_other_machines_run_or_say_what_is_missing(connected: Comfy) -> None:
    below = models(connected) / "sub dir"
    below.mkdir(parents=True)
    shutil.copy(DEMO / "mar-draft.safetensors", below / "x.safetensors")
    for choice in ("sub dir\\x.safetensors", "sub dir/x.safetensors"):
        connected.run(load(connected, "FastARLoadMAR", checkpoint=choice, decoder="demo-kl"))
    for choice in ("mar-base.safetensors", "mar-base (download 832 MB)", "mar-base", "old\\mar-base.safetensors"):
        said = connected.complaint(load(connected, "FastARLoadMAR", checkpoint=choice))
        assert said.startswith("checkpoint: the run would download mar-base (832 MB)") and "allow_download" in said
    said = connected.complaint(load(connected, "FastARLoadMAR", decoder="old/kl16.ckpt"))
    assert said.startswith("decoder: the run would download kl16-original (266 MB)")
    with pytest.raises(Rejected) as problem:
        connected.queue(load(connected, "FastARLoadMAR", checkpoint="gone/x.safetensors"))
    assert "'gone/x.safetensors' is not in" in str(problem.value) and "sub dir" in str(problem.value)
    assert "Value not in list" not in str(problem.value)
