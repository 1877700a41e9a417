"""A real ComfyUI for the tests: found on this machine, started
in a folder of its own, spoken to over HTTP and websocket.

The tests run in the pack's own environment, not ComfyUI's.
"""

import io
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from comfy_device import OPTIONS
from flat_graphs import flat
from PIL import Image
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
PACK = "fastar-nodes"
JANUS = ROOT / "tests" / "parity" / "janus" / "original"
JANUS_4O = ROOT / "tests" / "parity" / "janus_images" / "model"
NEXTSTEP = ROOT / "tests" / "parity" / "nextstep" / "model"
# On SIGUSR1 the server prints the stack of every thread into its log.
# SIGUSR2: free what only the allocator and reference cycles hold.
# Without this, resident memory depends on how blocks came to lie.
_STACKS = """import faulthandler, signal
if hasattr(faulthandler, "register"):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
if hasattr(signal, "SIGUSR2"):
    import ctypes, gc
    def trim(number, frame):
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)
    signal.signal(signal.SIGUSR2, trim)
"""


# What the editor sends beside a prompt, as far as it matters here.
EDITOR = {"extra_pnginfo": {"workflow": {"nodes": []}}}


class Missing(Exception):
    """No usable ComfyUI; the message says what was looked for."""


def find_core() -> Path:
    """The checkout that $COMFYUI_PATH names, else comfy-cli's default workspace."""
    path = Path(os.environ.get("COMFYUI_PATH") or "~/comfy/ComfyUI").expanduser()
    if not all((path / part).exists() for part in ("main.py", "comfyui_version.py", "comfy")):
        raise Missing(f"no ComfyUI at {path}; set COMFYUI_PATH to a checkout")
    return path.resolve()


def find_python(core: Path) -> str:
    """An interpreter that can run it: $COMFYUI_PYTHON, the checkout's own environment, or this one."""
    own = [core / d / s for d in (".venv", "venv") for s in ("bin/python", "Scripts/python.exe")]
    found = [os.environ.get("COMFYUI_PYTHON"), *map(str, filter(Path.exists, own)), sys.executable]
    for candidate in filter(None, found):
        line = [candidate, "-c", "import aiohttp, torchsde"]
        if not subprocess.run(line, capture_output=True, timeout=60).returncode:
            return candidate
    raise Missing(f"no interpreter for {core}; set COMFYUI_PYTHON")


def offline_option(core: Path) -> str:
    """The option that keeps server and editor from the internet; the older one is deprecated since 0.39."""
    known = (core / "comfy" / "cli_args.py").read_text(encoding="utf-8")
    return "--offline" if '"--offline"' in known else "--disable-api-nodes"


class Rejected(Exception):
    """The server did not take a prompt; the message holds the server's answer."""


class Comfy:
    """A running server. Use as a context manager.

    Args:
        environment: variables of the server beside those of this process.
        options: further options of its command line.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> None:
        self.core = find_core()
        python = find_python(self.core)
        self.base = Path(tempfile.mkdtemp(prefix="fastar-comfy-"))
        (self.base / "custom_nodes").mkdir()
        try:
            (self.base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
        except OSError:  # Windows without the right to make links
            shutil.copytree(ROOT, self.base / "custom_nodes" / PACK, ignore=shutil.ignore_patterns(".*", "tests"))
        (self.base / "startup").mkdir()
        (self.base / "startup" / "sitecustomize.py").write_text(_STACKS)
        self._copy_example()
        # Stands for Janus-Pro-1B: the recorded tiny network on the grid of the real one.
        weights = self.base / "models" / "fastar" / "Janus-Pro-1B"
        shutil.copytree(JANUS, weights, ignore=shutil.ignore_patterns("*.safetensors"))
        torch.save(load_file(JANUS / "model.safetensors"), weights / "pytorch_model.bin")
        # Stands for Janus-4o-7B: the recorded tiny network that reads images, on its own grid.
        weights = weights.with_name("Janus-4o-7B")
        shutil.copytree(JANUS_4O, weights)
        stated = json.loads((weights / "config.json").read_text(encoding="utf-8"))
        (weights / "config.json").write_text(json.dumps({**stated, "vq_config": {"num_patches": 4}}), encoding="utf-8")
        # Stands for NextStep-1-Large-Edit, and for NextStep-1.1: the recorded tiny network with its autoencoder.
        for name in ("NextStep-1-Large-Edit tiny", "NextStep-1.1"):
            shutil.copytree(NEXTSTEP, weights.with_name(name))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = self.base / "server.log"
        line = f"--listen 127.0.0.1 --port {self.port} {offline_option(self.core)} --disable-auto-launch"
        line += " --database-url sqlite:///:memory: --base-directory"
        more = shlex.split(os.environ.get("COMFYUI_OPTIONS", ""))  # for example the folder of another frontend
        paths = [str(self.base / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            [python, str(self.core / "main.py"), *OPTIONS, *line.split(), str(self.base), *options, *more],
            stdout=self.log_file.open("w"),
            stderr=subprocess.STDOUT,
            cwd=self.base,
            env={**os.environ, **own, **(environment or {})},
        )

    def _copy_example(self) -> None:
        """Give the server the one image that ComfyUI comes with."""
        (self.base / "input").mkdir()
        shutil.copy(self.core / "input" / "example.png", self.base / "input")

    def __enter__(self) -> "Comfy":
        began = time.monotonic()
        while True:
            try:
                self.stats = self.get("/system_stats")
                return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() - began > 240:
                    log = self.log
                    self.__exit__()
                    raise RuntimeError(f"ComfyUI did not start:\n{log[-4000:]}") from None
                time.sleep(0.25)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self._keep_log()
        shutil.rmtree(self.base, ignore_errors=True)

    def _keep_log(self) -> None:
        """Copy the server's log to $FASTAR_ARTIFACTS, if it is set."""
        named = os.environ.get("FASTAR_ARTIFACTS")
        if named:
            Path(named).mkdir(parents=True, exist_ok=True)
            shutil.copy(self.log_file, Path(named) / f"server_{self.port}.log")

    def forget_settings(self) -> None:
        """Let the editor open as for a new user: the server reads the file of settings at every request."""
        (self.base / "user" / "default" / "comfy.settings.json").unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def version(self) -> str:
        return self.stats["system"]["comfyui_version"]

    # --- HTTP

    def bytes(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()

    def get(self, path: str) -> Any:
        return json.loads(self.bytes(path))

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(data).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def queue(self, prompt: dict[str, Any], client: str = "", extra: Mapping[str, Any] | None = None) -> str:
        """Queue an API prompt; its id. ``extra``: data beside it, :data:`EDITOR` for what the editor sends.

        Raises:
            Rejected: with the server's words.
        """
        data = {"prompt": prompt, "client_id": client or uuid.uuid4().hex, "extra_data": dict(extra or {})}
        try:
            return self.post("/prompt", data)["prompt_id"]
        except urllib.error.HTTPError as problem:
            raise Rejected(problem.read().decode()) from None

    def wait(self, prompt_id: str, timeout: float = 240) -> dict[str, Any]:
        """The history entry of a prompt that has ended, well or not."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = self.get(f"/history/{prompt_id}")
            if found and found[prompt_id]["status"]["completed"] or found and self.failure(found[prompt_id]):
                return found[prompt_id]
            time.sleep(0.05)
        before = len(self.log)
        if hasattr(signal, "SIGUSR1"):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
        log = self.log
        shown = f"{log[before - 2000 : before]}\n{log[before:][:20_000]}"
        raise TimeoutError(f"prompt {prompt_id} did not end in {timeout} s; log:\n{shown}")

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Outputs by node id of a prompt that must succeed."""
        entry = self.wait(self.queue(prompt))
        assert not self.failure(entry), self.failure(entry)
        return entry["outputs"]

    @staticmethod
    def failure(entry: dict[str, Any]) -> str:
        """What stopped a prompt: the exception's message, "interrupted", or ""."""
        for name, data in entry["status"]["messages"]:
            if name == "execution_error":
                return data["exception_message"]
            if name == "execution_interrupted":
                return "interrupted"
        return ""

    @staticmethod
    def exception_type(entry: dict[str, Any]) -> str:
        """Full name of the exception that stopped a prompt, or ""."""
        return next((d["exception_type"] for name, d in entry["status"]["messages"] if name == "execution_error"), "")

    @contextmanager
    def events(self, client: str, editor: bool = True) -> Iterator[Iterator[tuple[str, Any]]]:
        """What the server tells a client: (event type, data); previews as ("preview",
        (metadata, JPEG bytes)), texts on nodes as ("text", (node, text)). ``editor``:
        whether it says, as the editor does, that it reads previews with metadata.
        """
        import websocket  # of the package websocket-client

        with closing(
            websocket.create_connection(f"{self.url.replace('http', 'ws')}/ws?clientId={client}", 60)
        ) as found:
            if editor:
                found.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
            yield _events(found)

    def complaint(self, prompt: dict[str, Any]) -> str:
        """The message with which a prompt that must fail does: rejected at once, or when a node runs."""
        try:
            failed = self.failure(self.wait(self.queue(prompt)))
        except Rejected as problem:
            return str(problem)
        assert failed, "it was taken and ran"
        return failed

    def picture(self, output: dict[str, Any]) -> Image.Image:
        """A file that a Save or Preview node listed; of an animation a frame in the middle."""
        query = urllib.parse.urlencode({k: output[k] for k in ("filename", "subfolder", "type")})
        image = Image.open(io.BytesIO(self.bytes(f"/view?{query}")))
        image.seek(getattr(image, "n_frames", 1) // 2)
        return image.convert("RGB")


def _events(connection: Any) -> Iterator[tuple[str, Any]]:
    while data := connection.recv():
        if isinstance(data, str):
            message = json.loads(data)
            yield message["type"], message["data"]
        else:
            event, size = struct.unpack(">II", data[:8])
            if event in (1, 2):  # the older form, without metadata
                yield "preview", ({}, data[8:])
            if event == 3:
                yield "text", (data[8 : 8 + size].decode(), data[8 + size :].decode())
            if event == 4:
                yield "preview", (json.loads(data[8 : 8 + size]), data[8 + size :])


VIRTUAL = ("Note", "MarkdownNote")  # what the editor draws and the server never sees
TEMPLATES = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))


def load_workflow(name: str) -> dict[str, Any]:
    """A template of this pack, by its name or by words with which the name of one begins ("06 FastHybrid")."""
    if name not in TEMPLATES:
        (name,) = [known for known in TEMPLATES if known.startswith(f"{name} ")]
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def one_image(label: str = "cat") -> dict[str, Any]:
    """Template 01 with one label and one image instead of twenty."""
    graph = load_workflow("01 Ten")
    (node,) = [node for node in graph["nodes"] if node["type"] == "FastARClassLabel"]
    names = [*widgets("FastARClassLabel")]
    node["widgets_values"][names.index("labels")] = label
    node["widgets_values"][names.index("images_per_label")] = 1
    return graph


# The templates that are Apps too.
APPS = [name for name in TEMPLATES if "linearData" in load_workflow(name)["extra"]]


def defaults(about: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Inputs of a node, from its /object_info: every widget at its default, a preset at custom."""
    groups = [about["input"].get(group, {}) for group in ("required", "optional")]
    named = {name: about[1] for group in groups for name, about in group.items() if len(about) > 1}
    out = {name: options["default"] for name, options in named.items() if "default" in options}
    if "preset" in named:
        out["preset"] = "custom"
    return out | changes


def to_api(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """A saved graph as the prompt that the editor would send (no bypassed nodes)."""
    workflow = flat(workflow)
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in VIRTUAL:
            continue
        about, values = object_info[node["type"]], node.get("widgets_values") or []
        names = widget_names(about)
        assert len(values) <= len(names), f"{node['type']} has more values than widgets"
        inputs = dict(zip(names, values, strict=False))
        # Widgets that were added after the graph was saved take their defaults.
        usual = defaults(about)
        inputs |= {name: usual[name] for name in names[len(values) :] if name in usual}
        inputs = {name: value for name, value in inputs.items() if not name.startswith("control_after_generate")}
        for socket_ in node["inputs"]:
            if socket_["link"] is not None:
                link = links[socket_["link"]]
                inputs[socket_["name"]] = [str(link[1]), link[2]]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def widget_names(info: dict[str, Any]) -> list[str]:
    """Widgets of a node type in the order in which a saved graph keeps their values."""
    names = []
    for group in ("required", "optional"):
        for name, about in info["input"].get(group, {}).items():
            options = about[1] if len(about) > 1 else {}
            if isinstance(about[0], list) or about[0] in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
                if not options.get("forceInput"):
                    names.append(name)
                    names += [f"control_after_generate:{name}"] if options.get("control_after_generate") else []
    return names


def widgets(node: str) -> dict[str, Any]:
    """Widgets of a node of this pack at their defaults, from the record
    of its schema; menus of files have none there. Presets are at custom.
    """
    recorded = json.loads((ROOT / "tests" / "nodes" / "schemas.json").read_text(encoding="utf-8"))[node]["widgets"]
    out = {name: about[0] for name, _, *about in recorded if len(about) > 1}
    return {**out, "preset": "custom"} if "preset" in out else out


# A 10 x 10 sweep of small cells, as values of Sweep's widgets.
TEN = {"x": "threshold", "x_values": "0.1..1 x 10", "y": "lookahead", "y_values": "1..10", "seeds": "7"}
TEN |= {"settings": "steps=4, diffusion_steps=6, guided_steps=3"}


def sweep_workflow(folder: str) -> dict[str, Any]:
    """The shared sweep with :data:`TEN`."""
    workflow = load_workflow("15 Sweep")
    values = {"FastARSweep": {**TEN, "folder": folder}, "FastARClassLabel": {"labels": "cat"}}
    inside = [node for about in workflow.get("definitions", {}).get("subgraphs", []) for node in about["nodes"]]
    for node in [*workflow["nodes"], *inside]:
        for name, value in values.get(node["type"], {}).items():
            node["widgets_values"][[*widgets(node["type"])].index(name)] = value
    return workflow


def graph(**changes: dict[str, Any]) -> dict[str, Any]:
    """A small prompt on the demo: loader 1, labels 2, MAR 3, FastHybrid 4, decoded 5 and 6, Compare 7 saved by 8.

    Args:
        changes: node id with a leading "n" to inputs to set, for example ``n3={"cfg": 2.0}``; None takes an input away.
    """
    shared = {"model": ["1", 0], "condition": ["2", 0], "seed": 7, "steps": 8, "diffusion_steps": 8, "cfg": 3.0}
    shared |= {"cfg_schedule": "linear", "temperature": 1.0}
    mar = widgets("FastARMARSampler")
    mar |= shared
    fast = widgets("FastARFastHybridSampler")
    fast |= {**shared, "lookahead": 3, "threshold": 0.95, "guided_steps": 4}
    pair = {"image_1": ["5", 0], "report_1": ["3", 1], "image_2": ["6", 0], "report_2": ["4", 1]}
    labels = {"labels": "cat, boat", "label_set": "picture-book", "images_per_label": 1, "add_label": "none"}
    nodes = {
        "1": ("FastARLoadMAR", {**widgets("FastARLoadMAR"), "checkpoint": "demo", "decoder": "auto", "speed": "plain"}),
        "2": ("FastARClassLabel", labels),
        "3": ("FastARMARSampler", mar),
        "4": ("FastARFastHybridSampler", fast),
        "5": ("VAEDecode", {"samples": ["3", 0], "vae": ["1", 1]}),
        "6": ("VAEDecode", {"samples": ["4", 0], "vae": ["1", 1]}),
        "7": ("FastARCompare", {**widgets("FastARCompare"), **pair}),
        "8": ("SaveImage", {"images": ["7", 0], "filename_prefix": "test"}),
    }
    prompt = {key: {"class_type": kind, "inputs": dict(inputs)} for key, (kind, inputs) in nodes.items()}
    for key, inputs in changes.items():
        inputs = dict(inputs)
        node = prompt.setdefault(key[1:], {"class_type": inputs.pop("class_type", None), "inputs": {}})
        node["inputs"] = {k: v for k, v in {**node["inputs"], **inputs}.items() if v is not None}
    return prompt
