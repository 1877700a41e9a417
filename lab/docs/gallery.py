"""Draw docs/gallery.md: forty images of the demo models, seeds 0 to 39 in order, none of them left out.

Every model has eight consecutive seeds, and a seed's subject is the class of its last digit, so nothing is chosen. Each
image holds its graph: dropped on ComfyUI, it opens.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from ...pipeline import load
from ...runs.labels import PICTURE_BOOK
from ...runs.registry import SAMPLERS, first_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
FOLDER = ROOT / "docs" / "gallery"
SEEDS = 40
COLUMNS = 8  # images of a model, in a row of the page


@dataclass(frozen=True)
class Model:
    """A demo model of the page, and how a graph draws with it."""

    checkpoint: str
    loader: str
    words: bool = False  # whether it reads prompts; others read class labels


MODELS = (
    Model("demo", "FastARLoadMAR"),
    Model("demo-llamagen", "FastARLoadLlamaGen"),
    Model("demo-hybrid", "FastARLoadHarmon", words=True),
    Model("demo-dtok", "FastARLoadTarDetokenizer", words=True),
    Model("demo-bitdance", "FastARLoadBitDance"),
)


def subject(seed: int) -> str:
    """What the image of a seed shows."""
    return PICTURE_BOOK[seed % len(PICTURE_BOOK)]


def wish(model: Model, seed: int) -> str:
    """The label or the prompt of an image."""
    name = subject(seed)
    return f"a {name}" if model.words and not name.endswith("s") else name


def graph(model: Model, sampler: str, seed: int) -> dict[str, Any]:
    """The graph of an image, as ComfyUI writes it into its files."""
    text = wish(model, seed)
    condition: dict[str, Any] = {"class_type": "FastARClassLabel", "inputs": {"labels": text}}
    if model.checkpoint == "demo-dtok":
        condition = {"class_type": "FastARTarPrompt", "inputs": {"tar": ["6", 0], "text": text, "seed": seed}}
    elif model.words:
        condition = {"class_type": "FastARPrompt", "inputs": {"text": text}}

    own = SAMPLERS[sampler]
    entry = next(entry for entry in first_names().values() if entry.run is own.run)  # Tar has LlamaGen's node
    drawn = {"model": ["1", 0], "condition": ["2", 0], "seed": seed}
    nodes: dict[str, Any] = {
        "1": {"class_type": model.loader, "inputs": {"checkpoint": model.checkpoint}},
        "2": condition,
        "3": {"class_type": entry.node, "inputs": drawn},
        "4": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["1", 1]}},
        "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "FastAR"}},
    }
    if model.checkpoint == "demo-dtok":
        nodes["6"] = {"class_type": "FastARLoadTar", "inputs": {"checkpoint": "demo-tar"}}
    return nodes


def name(model: Model, seed: int) -> str:
    """The file of an image."""
    return f"{seed:02d}-{model.checkpoint}-{subject(seed)}.png"


def page() -> str:
    """The page: a row of images for each model."""
    lines = [
        "# Gallery",
        "",
        f"The demo models generated these {SEEDS} images with the seeds 0 to {SEEDS - 1}, {COLUMNS} for each model. We "
        "left none out. The last digit of a seed chooses the subject.",
        "Each image contains its workflow. Drag the image onto ComfyUI to open the workflow. `python -m "
        "fastar_nodes.lab gallery` generates the images again.",
    ]
    for row, model in enumerate(MODELS):
        lines += ["", f"## {model.checkpoint}", ""]
        for seed in range(row * COLUMNS, (row + 1) * COLUMNS):
            about = f"{wish(model, seed)}, seed {seed}"
            lines.append(f'<img src="gallery/{name(model, seed)}" alt="{about}" title="{about}" width="110">')
    return "\n".join(lines) + "\n"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    known = [model.checkpoint for model in MODELS]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"models to draw; default all: {', '.join(known)}")


def run(options: argparse.Namespace) -> int:
    """Draw the images and write the page; returns the exit code."""
    FOLDER.mkdir(exist_ok=True)
    for row, model in enumerate(MODELS):
        if options.models and model.checkpoint not in options.models:
            continue

        pipe = load(model.checkpoint, device="cpu")
        for seed in range(row * COLUMNS, (row + 1) * COLUMNS):
            images, _ = pipe(wish(model, seed), seed=seed)
            _save(images[0], graph(model, pipe.samplers[0], seed), FOLDER / name(model, seed))
            print(name(model, seed), flush=True)

    PAGE.write_text(page(), encoding="utf-8")
    return 0


def _save(image: Image.Image, nodes: dict[str, Any], path: Path) -> None:
    """Write an image with its graph in it, under the name that ComfyUI's own files have."""
    about = PngImagePlugin.PngInfo()
    about.add_text("prompt", json.dumps(nodes))
    image.save(path, pnginfo=about, optimize=True)
