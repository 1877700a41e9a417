"""Draw the thumbnails of the templates: ``python -m fastar_nodes.tools.thumbnails [NUMBER ...]``.

A template is run as it is opened, on the nodes of this checkout without a ComfyUI, and what it draws is enlarged
smoothly to 512 x 512 pixels: one image, those that are compared, or an image before and after an edit, without labels
and figures. A template that needs a download gets a sign in place of what it draws. The frontend shows ``NAME.jpg``
beside ``NAME.json``, of Apps too.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from ..reports.drawing import Ink
from ..samplers.choice import choose

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "workflows"
SIDE, QUALITY = 512, 90
# Pixels of one of two images that lie one over the other, of one of four, and of the line around them.
OF_TWO, OF_FOUR, GAP = 328, 252, 4
# AR steps of the two runs of a race that have ended.
STEPS = (22, 27)
SEED = 100  # of the Advisor's plain sampler
GREY = 128  # of tokens that are not decided yet


class Template:
    """A template whose nodes run when their outputs are asked for; those in sub-graphs are among its nodes."""

    def __init__(self, path: Path):
        sys.path[:0] = [str(ROOT / "tests" / "lib"), str(ROOT / "tests" / "nodes")]
        fake_comfy = import_module("fake_comfy")
        fake_comfy.install()
        self._folder = tempfile.TemporaryDirectory()  # for the cells of a sweep
        self._state = fake_comfy.state
        self._run = import_module("graphs").Run(import_module("test_schemas").CLASSES, {})
        self._run.open(json.loads(path.read_text(encoding="utf-8")))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Its nodes of a type."""
        return [node for node in self._run.nodes.values() if node["type"] == kind]

    def source(self, node: dict[str, Any], name: str) -> tuple[dict[str, Any], int]:
        """The node behind a connected input of a node, and the number of its output."""
        (link,) = [socket["link"] for socket in node["inputs"] if socket["name"] == name]
        _, number, slot, *_ = self._run.links[link]
        return self._run.nodes[number], slot

    def output(self, node: dict[str, Any], slot: int = 0) -> Any:
        """An output of a node."""
        before = self._state.folder
        self._state.folder = Path(self._folder.name)
        try:
            with torch.inference_mode():  # as ComfyUI runs nodes
                return self._run.outputs(node["id"])[slot]
        finally:
            self._state.folder = before

    def given(self, node: dict[str, Any], name: str) -> Any:
        """What a connected input of a node gets."""
        return self.output(*self.source(node, name))

    def saved(self) -> np.ndarray:
        """The image of the first node that saves one, uint8 [H, W, 3]."""
        return pixels(self.given(self.of("SaveImage")[0], "images"))


def drawing(path: Path) -> Image.Image:
    """The thumbnail of a template."""
    if "download" not in path.stem:
        return _arranged(_images(Template(path)))

    template = Template(path)
    given = [pixels(template.output(node)) for node in template.of("LoadImage")]
    return _arranged([*given, np.asarray(_sign())])


def _images(template: Template) -> list[np.ndarray]:
    """What a template draws, each uint8 [H, W, 3]."""
    if sweeps := template.of("FastARSweep"):
        sweep = template.output(sweeps[0])
        cells = [sweep.store.read(cell.key) for cell in sweep.cells[:4]]
        return [images[0] for images, _ in cells]

    if races := template.of("FastARTimeLapse"):
        shown = []
        for number, steps in enumerate(STEPS, start=1):
            image, report = (template.given(races[0], f"{name}_{number}") for name in ("image", "report"))
            shown.append(_begun(image, report, steps))
        return shown

    if comparisons := template.of("FastARCompare"):
        return [pixels(template.given(comparisons[0], name)) for name in ("image_1", "image_2")]

    if advisors := template.of("FastARAdvisor"):
        # What it recommends is another sampler on another machine: the plain sampler's image only.
        running = import_module("fastar_nodes.nodes.running")
        model, condition = (template.given(advisors[0], name) for name in ("model", "condition"))
        images, _ = running.draw_images(choose(running.baseline_of(model), {}), model, condition, SEED)
        return [images[0]]

    if crops := template.of("FastARCropAroundMask"):
        (edit,) = template.of("FastARPasteInpaintedArea")
        return [pixels(template.given(crops[0], "image")), pixels(template.output(edit))]

    node, slot = template.source(template.of("SaveImage")[0], "images")
    if node["type"] == "ImageScale":
        node, slot = template.source(node, "image")
    return [pixels(template.output(node, slot))]


def pixels(image: Any) -> np.ndarray:
    """The first image of a batch."""
    return (image[0].clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def _begun(image: Any, report: Any, steps: int) -> np.ndarray:
    """An image after some AR steps, the tokens to come in grey."""
    shown = pixels(image).copy()
    step = np.asarray(report.maps["step"])[0]
    cell = shown.shape[0] // step.shape[0]
    to_come = np.kron(step >= steps, np.ones((cell, cell), bool))
    shown[to_come] = GREY
    return shown


def _arranged(images: Sequence[np.ndarray]) -> Image.Image:
    """One image fills the square, two lie one over the other, four stand in two rows."""
    sheet = Image.new("RGB", (SIDE, SIDE), Ink.BACKGROUND)
    if len(images) == 1:
        return _enlarged(images[0], SIDE)

    if len(images) == 2:
        far = SIDE - OF_TWO
        sheet.paste(_enlarged(images[0], OF_TWO), (0, 0))
        ImageDraw.Draw(sheet).rectangle((far - 2 * GAP, far - 2 * GAP, SIDE, SIDE), fill=Ink.BACKGROUND)
        sheet.paste(_enlarged(images[1], OF_TWO), (far, far))
        return sheet

    far = SIDE - OF_FOUR
    for image, place in zip(images, [(0, 0), (far, 0), (0, far), (far, far)], strict=True):
        sheet.paste(_enlarged(image, OF_FOUR), place)
    return sheet


def _enlarged(image: np.ndarray, side: int) -> Image.Image:
    return Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)


def _sign() -> Image.Image:
    """An arrow into a tray, for a model that is not part of the package."""
    sheet = Image.new("RGB", (SIDE, SIDE), Ink.BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    colour = (95, 184, 214)
    pen.rectangle((232, 96, 280, 250), fill=colour)
    pen.polygon([(156, 240), (356, 240), (256, 350)], fill=colour)
    pen.line([(120, 330), (120, 410), (392, 410), (392, 330)], fill=colour, width=28, joint="curve")
    return sheet


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastar_nodes.tools.thumbnails", description=__doc__)
    parser.add_argument(
        "numbers", nargs="*", metavar="NUMBER", help="number of a template, for example 01; default all"
    )
    asked = parser.parse_args(argv).numbers

    for path in sorted(FOLDER.glob("*.json")):
        if path.stem.endswith(".app") or (asked and path.stem[:2] not in asked):
            continue
        thumbnail = drawing(path)
        for name in (path.stem, f"{path.stem}.app"):
            if (FOLDER / f"{name}.json").is_file():
                thumbnail.save(FOLDER / f"{name}.jpg", quality=QUALITY, optimize=True)
        print(path.stem, flush=True)

    return 0


if __name__ == "__main__":
    sys.exit(main())
