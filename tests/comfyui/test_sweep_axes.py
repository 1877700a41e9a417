"""Sweep over checkpoints, labels and prompts in a real ComfyUI: loaders and prompts are run again with other values."""

from typing import Any

from comfy_host import Comfy, defaults


def swept(
    comfy: Comfy, info: dict[str, Any], loader: str, maker: str, maker_inputs: dict[str, Any], **plan: str
) -> Any:
    """The table of a sweep, as lines of cells."""
    sweep = defaults(info["FastARSweep"], model=["load", 0], condition=["make", 0], **plan)
    prompt = {
        "load": {"class_type": loader, "inputs": defaults(info[loader])},
        "make": {"class_type": maker, "inputs": defaults(info[maker], **maker_inputs)},
        "sweep": {"class_type": "FastARSweep", "inputs": sweep},
        "read": {"class_type": "PreviewAny", "inputs": {"source": ["sweep", 1]}},
    }
    outputs = comfy.run(prompt)
    lines = outputs["read"]["text"][0].splitlines()
    return [[part.strip() for part in line.strip("| ").split("|")] for line in lines if not line.startswith("|-")]


def test_checkpoints_and_labels_are_axes(comfy: Comfy, info: dict[str, Any]) -> None:
    few = {"settings": "steps=4, diffusion_steps=6", "seeds": "7", "folder": "axes"}
    axes = {"x": "checkpoint", "x_values": "demo, demo-draft", "y": "label", "y_values": "cat, boat"}
    head, *rows = swept(comfy, info, "FastARLoadMAR", "FastARClassLabel", {"labels": "cat"}, **few, **axes)
    assert head[:2] == ["checkpoint", "label"]
    assert [row[:2] for row in rows if set(row[0]) - {"-", " "}] == [
        [checkpoint, label] for label in ("cat", "boat") for checkpoint in ("demo", "demo-draft")
    ]
    files = list((comfy.base / "output" / "fastar_sweeps" / "axes").glob("*.png"))
    assert len(files) == 4 + 4, "each of them with its plain sampler"
    assert len({path.read_bytes() for path in files}) == 8


def test_prompts_and_presets_are_axes(comfy: Comfy, info: dict[str, Any]) -> None:
    few = {"settings": "steps=4, diffusion_steps=6", "seeds": "7", "folder": "prompts"}
    axes = {"x": "preset", "x_values": "exact, balanced", "y": "prompt", "y_values": "a red boat, small; a cat"}
    prompt = {"text": "a fish"}
    head, *rows = swept(comfy, info, "FastARLoadHarmon", "FastARPrompt", prompt, **few, **axes)
    assert head[:2] == ["preset", "prompt"]
    assert [row[:2] for row in rows if set(row[0]) - {"-", " "}] == [
        [preset, text] for text in ("a red boat, small", "a cat") for preset in ("exact", "balanced")
    ]
