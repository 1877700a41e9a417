"""A stranger's graph and pictures on a real server: nothing is downloaded, opened or written that its user did not allow.

Runs on the ComfyUI that it is given; 0.27 is the oldest supported one and does not check names of pictures itself.
"""

import json
import shutil
from typing import Any

import pytest
from comfy_host import Rejected, defaults
from PIL import Image
from PIL.PngImagePlugin import PngInfo

# Loader, widget and a large entry of its menu.
LARGE = {
    "FastARLoadMAR": ("checkpoint", "mar-huge"),
    "FastARLoadLlamaGen": ("checkpoint", "llamagen-3b-384"),
    "FastARLoadTar": ("checkpoint", "tar-7b"),
    "FastARLoadTarDetokenizer": ("checkpoint", "ar-dtok-1024"),
    "FastARLoadHybrid": ("checkpoint", "harmon-1.5b"),
    "FastARLoadJanus": ("checkpoint", "janus-pro-7b"),
    "FastARTextPrompt": ("encoder", "flan-t5-xl"),
    "FastARImageToCodes": ("ta_tok", "ta-tok"),
}


def loading(info: dict[str, Any], node: str, **inputs: Any) -> dict[str, Any]:
    """A graph that runs a loader."""
    if node == "FastARImageToCodes":
        inputs["image"] = ["2", 0]
    return {
        "1": {"class_type": node, "inputs": defaults(info[node], **inputs)},
        "2": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
        "3": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }


def files(comfy) -> set[str]:
    """Files in the model folders."""
    return {str(p) for p in (comfy.base / "models").rglob("*") if p.is_file()}


@pytest.mark.parametrize("node", LARGE)
def test_a_forged_entry_is_rejected_and_nothing_is_fetched(comfy, info, node):
    widget, name = LARGE[node]
    before = files(comfy)
    for text in (f"{name} (download 12 kB)", f"{name} (already on your disk)", name, f" {name}"):
        with pytest.raises(Rejected, match=widget):
            comfy.queue(loading(info, node, **{widget: text, "allow_download": True}))
    assert files(comfy) == before


@pytest.mark.parametrize("node", LARGE)
def test_a_large_entry_of_the_menu_needs_the_switch(comfy, info, node):
    widget, name = LARGE[node]
    (entry,) = (c for c in info[node]["input"]["required"][widget][1]["options"] if c.startswith(f"{name} ("))
    for allowed in (False, True):  # the server is offline
        message = comfy.complaint(loading(info, node, **{widget: entry, "allow_download": allowed}))
        assert message.startswith(f"{widget}: ") and ("allow_download" in message) != allowed


def opened(comfy, name: str) -> str:
    """What Load Report says about a file."""
    read = {"class_type": "FastARLoadReport", "inputs": {"image": name}}
    return comfy.complaint({"1": read, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 2]}}})


@pytest.fixture
def secret(comfy):
    """A readable report outside of ComfyUI's folders."""
    path = comfy.base / "secret.png"
    run = {"sampler": "mar", "model": "secret", "settings": {}, "seed": 1, "images": 1, "seconds": 1.0}
    about = PngInfo()
    about.add_text("fastar", json.dumps({"version": 1, "runs": [run]}))
    Image.new("RGB", (8, 8)).save(path, pnginfo=about)
    shutil.copy(path, comfy.base / "input" / "open.png")
    yield path
    (comfy.base / "input" / "open.png").unlink()


def test_no_picture_outside_of_comfyuis_folders_is_opened(comfy, secret):
    with pytest.raises(AssertionError):  # it can be read where it may be
        opened(comfy, "open.png")
    for name in ("../secret.png", str(secret), "../../../../../../../../etc/passwd", "sub/../../secret.png"):
        for place in ("", " [input]", " [output]", " [temp]"):
            message = opened(comfy, f"{name}{place}")
            assert "image" in message and "there is no picture" in message and "Traceback" not in message, message
