"""What a node learns from the graph around it."""

from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import fake_comfy
import pytest
from fastar_nodes.nodes import host
from fastar_nodes.nodes.editing import CropAroundMask


def checked(monkeypatch: Any, graph: Any, image: Any = None) -> bool | str:
    """The answer of Crop around Mask, node 9, while the server checks a graph."""
    host.server.watch_prompts(lambda request: None)
    keep = fake_comfy.state.prompt_handlers[-1]
    monkeypatch.setattr(fake_comfy.state, "context", SimpleNamespace(prompt_id="a", node_id="9"))

    def check() -> bool | str:
        keep({"prompt": graph})
        return CropAroundMask.validate_inputs(image)

    return copy_context().run(check)


def template(own: Any, image: Any = "", title: Any = "Your own image") -> dict[str, Any]:
    """Template 05 as the editor sends it: the example, or Load Image, by a switch."""
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": image}, "_meta": {"title": title}},
        "2": {"class_type": "EmptyImage", "inputs": {"width": 64}},
        "3": {"class_type": "ComfySwitchNode", "inputs": {"switch": own, "on_false": ["2", 0], "on_true": ["1", 0]}},
        "4": {"class_type": "ImageScale", "inputs": {"image": ["3", 0], "width": 512}},
        "9": {"class_type": "FastARCropAroundMask", "inputs": {"image": ["4", 0], "mask": ["1", 1], "context": 1.25}},
    }


def test_an_image_that_was_not_chosen_is_asked_for_before_the_run(monkeypatch):
    told = "'Your own image' has no file; choose or upload an image in that node, or switch that node off."
    assert checked(monkeypatch, template(own=True)) == told
    assert checked(monkeypatch, template(own=True, title=None)).startswith("'Load Image' has no file;")
    assert checked(monkeypatch, template(own=True, image="cat.png")) is True
    # The other side of the switch does not run; a switch over a link may take either.
    assert checked(monkeypatch, template(own=False)) is True
    assert checked(monkeypatch, template(own=["5", 0])) == told


def test_comfyui_does_not_read_the_file_that_was_not_chosen(monkeypatch):
    """It would take the empty name for the input folder; a file that was chosen is read for changes."""
    for image, seen in (("", [False]), ("cat.png", None)):
        graph = template(own=False, image=image)
        assert checked(monkeypatch, graph) is True
        assert graph["1"].get("is_changed") == seen and not any("is_changed" in graph[key] for key in "2349")


@pytest.mark.parametrize(
    "graph",
    [
        None,
        [],
        {},
        {"9": {}},
        {"9": {"inputs": {"image": ["1", 0]}}},
        {"9": {"inputs": {"image": ["9", 0]}}},
        {"9": {"inputs": {"image": ["1", 0]}}, "1": 5},
        {"9": {"inputs": {"image": ["1", 0]}}, "1": {"class_type": ["LoadImage"], "inputs": {"image": ["9", 0]}}},
        {"9": {"inputs": {"image": ["1", 0]}}, "1": {"class_type": "LoadImage", "inputs": []}, "_meta": 3},
    ],
)
def test_graphs_of_any_shape_are_searched(monkeypatch, graph):
    assert checked(monkeypatch, graph) is True
