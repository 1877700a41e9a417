"""Presets over the API of a real ComfyUI: POST /prompt by everyone who sends one, on the demo."""

import json
from typing import Any

import pytest
from comfy_host import Comfy, defaults

FASTHYBRID, ZIPAR = "FastARFastHybridSampler", "FastARZipARSampler"
LOADERS = {FASTHYBRID: ("FastARLoadMAR", "demo"), ZIPAR: ("FastARLoadLlamaGen", "demo-llamagen-low")}


@pytest.fixture
def ran(comfy: Comfy, info: dict[str, Any]) -> Any:
    """A function from a sampler and what is sent to it to settings and counts of the run, and what the node says."""

    def run(node: str, **sent: Any) -> tuple[dict[str, Any], dict[str, int], str]:
        loader, checkpoint = LOADERS[node]
        prompt = {
            "load": {"class_type": loader, "inputs": defaults(info[loader], checkpoint=checkpoint)},
            "label": {"class_type": "FastARClassLabel", "inputs": defaults(info["FastARClassLabel"], labels="cat")},
            "draw": {
                "class_type": node,
                "inputs": {"model": ["load", 0], "condition": ["label", 0], "seed": 7, **sent},
            },
            "report": {"class_type": "FastARReport", "inputs": {"report": ["draw", 1], "format": "json"}},
            "read": {"class_type": "PreviewAny", "inputs": {"source": ["report", 0]}},
        }
        entry = comfy.wait(comfy.queue(prompt))
        assert not comfy.failure(entry)
        (report,) = json.loads(entry["outputs"]["read"]["text"][0])["runs"]
        said = " ".join(entry["outputs"].get("draw", {}).get("fastar_text", []))
        return report["settings"], report["counts"], said

    return run


def listed(info: dict[str, Any], node: str) -> dict[str, Any]:
    """The settings of a node at the defaults of /object_info."""
    own = info[node]["input"]["optional"]
    return {name: about[1]["default"] for name, about in own.items() if len(about) > 1 and "default" in about[1]}


def test_every_caller_gets_what_it_names(info: dict[str, Any], ran: Any) -> None:
    usual = listed(info, FASTHYBRID)
    alone, counts, _ = ran(FASTHYBRID, preset="fast")
    assert counts["head_calls"] > 0

    # The defaults of /object_info with another preset.
    settings, listed_counts, said = ran(FASTHYBRID, **{**usual, "preset": "fast"})
    assert settings == alone and listed_counts == counts
    assert "The preset fast set all numbers, because the request contained the node's default numbers" in said

    # All numbers of the preset, and one changed, here to the node's default.
    shown = {name: value for name, value in alone.items() if name in usual and value is not None}
    shown = {**usual, **shown, "t_max": 950, "diffusion_steps_end": alone["diffusion_steps"], "preset": "fast"}
    assert usual["guided_steps"] != shown["guided_steps"]
    changed, _, said = ran(FASTHYBRID, **{**shown, "guided_steps": usual["guided_steps"]})
    assert changed["guided_steps"] == usual["guided_steps"] and changed["steps"] == alone["steps"]
    assert "these numbers differ from *fast*" in said

    # Numbers as they are.
    assert ran(FASTHYBRID, **{**usual, "preset": "custom", "steps": 8})[0]["steps"] == 8


def test_a_window_that_is_the_default_is_used(info: dict[str, Any], ran: Any) -> None:
    """ZipAR's presets differ by it alone."""
    assert ran(ZIPAR, preset="fast")[0]["window"] == 4
    assert ran(ZIPAR, preset="fast", window=8)[0]["window"] == 8
    assert ran(ZIPAR, **{**listed(info, ZIPAR), "preset": "fast"})[0]["window"] == 4
