"""Draw the icon, README's animation and the images of the help pages.

Samplers are drawn by the demo on fixed seeds, without seconds, so that an image changes only if a sampler does.
Images of other nodes are what the templates that have them draw, with the seconds of the run.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from ...cli import compare
from ...cli.conditions import conditions
from ...cli.planning import load, plan, with_draft
from ...cli.running import draw
from ...errors import UserError
from ...reports.drawing import Ink
from ...reports.grid import compare_grid
from ...reports.maps import OUTCOMES, token_map
from ...reports.record import ACCEPTED, PLAIN
from ...reports.timelapse import FPS, time_lapse
from ...runs.drawing import decode
from ...runs.registry import first_names
from .thumbnails import Template, pixels

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "web" / "docs" / "images"
ICON = ROOT / "docs" / "icon.png"
BANNER = ROOT / "docs" / "banner.png"
ANIMATION = ROOT / "docs" / "time_lapse.webp"
ANIMATION_WIDTH = 480
SEED, MAP, WIDTH, QUALITY = 7, 512, 580, 55
_SKY_BLUE = (86, 180, 233)  # of the icon, from the palette of the token maps
# The token maps on the help page of a sampler; of the others where each token was decided.
MAPS = {
    "mar": ("fixed at step", "order"),
    "fasthybrid": ("outcome",),
    "lazymar": ("cached",),
    "cspd": ("outcome",),
    "mulosd": ("outcome",),
    "bitdance": ("fixed at step", "order"),
}


def pages() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Help page to the samplers on its image, the plain one first, and the token maps of the last one."""
    plain = {entry.family.kind: name for name, entry in reversed(first_names().items()) if entry.baseline}

    found = {}
    for name, entry in first_names().items():
        if "+" not in name and entry.demos(entry.families[0]):  # without a demo there is nothing to draw
            shown = dict.fromkeys((plain[entry.family.kind], name))
            found[entry.node] = ",".join(shown), MAPS.get(name, ("fixed at step",))
    return found


# Help page to its seed, where it is another one.
SEEDS = dict.fromkeys(("FastARLlamaGenSampler", "FastARZipARSampler", "FastARMuLoSDSampler"), 5)
# Help page to the number of the template.
TEMPLATES = {
    "FastARCompare": "06",
    "FastARPasteInpaintedArea": "05",
    "FastARSweep": "15",
    "FastARSweepPlot": "15",
    "FastARAdvisor": "16",
    "FastARTimeLapse": "03",
}
PAGES = pages()
PAGES = pages()
EVERY = ["icon", "banner", "animation", *PAGES, *TEMPLATES]


def sheet(samplers: str, maps: Sequence[str], seed: int) -> np.ndarray:
    """The images of samplers side by side, and token maps of the last one; uint8 [H, W, 3]."""
    parser = argparse.ArgumentParser()
    compare.arguments(parser)
    options = parser.parse_args(["--samplers", samplers, "--label", "cat", "--device", "cpu"])
    ready = load(options, [p.entry for p in plan(samplers, [], {})])
    planned = plan(samplers, [], ready)
    what = conditions(planned, options.label, options.text, 1, options, seed, {})
    made = [draw(p, condition, seed) for p, condition in zip(with_draft(planned, options), what, strict=True)]
    cells = [decode(p.on, result).numpy() for p, result in zip(planned, made, strict=True)]
    labels = [p.entry.title for p in planned]

    for name in maps:
        cells.append(token_map(made[-1].report, name, cells[len(made) - 1], size=MAP))
        labels.append(f"{labels[len(made) - 1]}: {name}")

    return compare_grid(cells, labels, [None] * len(cells), columns=len(cells))


def drawn(name: str) -> np.ndarray:
    """What the node of a page draws in its template; uint8 [H, W, 3]."""
    template = _template(name)
    if name == "FastARSweepPlot":  # the second image on the page of Sweep
        (sweep,) = template.of("FastARSweep")
        return pixels(template.output(sweep, 2))

    (node,) = template.of(name)
    if name == "FastARTimeLapse":
        frames = _frames(template, node)
        return frames[len(frames) // 2]
    if name == "FastARPasteInpaintedArea":
        return pixels(template.output(node, 1))
    if name == "FastARAdvisor":  # its image is not its first output
        return template.saved()
    return pixels(template.output(node))


def _template(name: str) -> Template:
    """The template that has the node of a page."""
    number = TEMPLATES[name]
    (path,) = (ROOT / "workflows").glob(f"{number} *.json")
    return Template(path)


def animation() -> list[Image.Image]:
    """The race of two samplers on one clock, of the template of Time-lapse."""
    template = _template("FastARTimeLapse")
    (race,) = template.of("FastARTimeLapse")

    frames = []
    for frame in _frames(template, race):
        image = Image.fromarray(frame)
        image.thumbnail((ANIMATION_WIDTH, ANIMATION_WIDTH), Image.Resampling.LANCZOS)
        frames.append(image)

    return frames


def _frames(template: Template, race: dict[str, Any]) -> np.ndarray:
    """The frames of an animation, uint8 [N, H, W, 3]."""
    images, reports = [], []
    for k in (1, 2):
        images.append((template.given(race, f"image_{k}") * 255).round().to(torch.uint8).numpy())
        reports.append(template.given(race, f"report_{k}"))
    labels = import_module("fastar_nodes.nodes.compare").automatic_labels(reports)
    result = import_module("fastar_nodes.nodes.timelapse").result_of(images, labels, reports)
    return time_lapse(images, labels, reports, 4.0, result)


def icon(side: int = 256) -> Image.Image:
    """A grid of 8 x 8 tokens in which blue and sky-blue ones form two arrow heads."""
    colours = np.full((8, 8, 3), OUTCOMES[PLAIN][1], np.uint8)
    for row in range(8):
        tip = min(row, 7 - row)
        colours[row, tip : tip + 2] = OUTCOMES[ACCEPTED][1]
        colours[row, tip + 3 : tip + 5] = _SKY_BLUE

    step, gap = side // 8, side // 64
    out = Image.new("RGB", (side, side), Ink.BACKGROUND)
    pen = ImageDraw.Draw(out)

    for y, x in np.ndindex(8, 8):
        box = (x * step + gap, y * step + gap, (x + 1) * step - gap - 1, (y + 1) * step - gap - 1)
        pen.rounded_rectangle(box, 2 * gap, fill=tuple(colours[y, x].tolist()))

    return out


def banner() -> Image.Image:
    """The registry's banner of 21:9: the icon, and squares of the templates' thumbnails in two rows."""
    height = 360
    out = Image.new("RGB", (height * 21 // 9, height), Ink.BACKGROUND)
    mark = icon(height * 2 // 3 // 64 * 64)
    out.paste(mark, ((height - mark.width) // 2, (height - mark.height) // 2))

    side = height // 2
    columns = (out.width - height) // side
    for k, path in enumerate(sorted((ROOT / "workflows").glob("*.jpg"))[: 2 * columns]):
        with Image.open(path) as picture:
            square = picture.convert("RGB").resize((side - 8, side - 8), Image.Resampling.LANCZOS)
        out.paste(square, (height + k % columns * side + 4, k // columns * side + 4))

    return out


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to draw; default all: {', '.join(EVERY)}")


def run(options: argparse.Namespace) -> int:
    """Draw; returns the exit code."""
    for name in options.names:
        if name not in EVERY:
            raise UserError(f"name: {name} is not an image of this command; choose one of {', '.join(EVERY)}.")

    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in options.names or EVERY:
        if name == "icon":
            icon().save(ICON, optimize=True)
        elif name == "banner":
            banner().save(BANNER, optimize=True)
        elif name == "animation":
            first, *others = animation()
            first.save(ANIMATION, save_all=True, append_images=others, duration=1000 // FPS, loop=0, quality=QUALITY)
        else:
            image = drawn(name) if name in TEMPLATES else sheet(*PAGES[name], SEEDS.get(name, SEED))
            picture = Image.fromarray(image)
            picture.thumbnail((WIDTH, WIDTH), Image.Resampling.LANCZOS)
            picture.save(FOLDER / f"{name}.jpg", quality=QUALITY, optimize=True)
        print(name, flush=True)

    return 0
