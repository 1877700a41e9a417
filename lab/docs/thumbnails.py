"""Draw the thumbnails of the templates.

A template is run as it is opened, on the nodes of this checkout without a ComfyUI. Its thumbnail has 512 x 512 pixels:
what it draws, which is one image, those that are compared, or an image before and after an edit; and below, its figure,
which is the same on every machine, or what it reads. A template that needs a download gets a sign in place of what it
draws. The frontend shows ``NAME.jpg`` beside ``NAME.json``.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ...reports.drawing import Canvas, Ink, contact_sheet, line_height, resize, text_width, wrap
from ...reports.summary import alone, fewer_calls
from ...runs.advice import candidates
from ...runs.choice import choose
from ...runs.images import to_bytes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
SIDE, QUALITY = 512, 90
# The share of the width that one of two images takes, which lie one over the other, and pixels between images.
OF_TWO, GAP = 0.64, 4
# Font sizes of the line below the images, the first that fits. The gallery shows a thumbnail at half its size.
TEXT = (54, 48, 42, 36)
MARGIN = 14
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
        self._run.open(json.loads(path.read_text(encoding="utf-8-sig")))

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
        with self._in_folder():
            return self._run.outputs(node["id"])[slot]

    @contextmanager
    def _in_folder(self) -> Iterator[None]:
        """Run nodes as ComfyUI does, with a folder of its own."""
        before = self._state.folder
        self._state.folder = Path(self._folder.name)
        try:
            with torch.inference_mode():
                yield
        finally:
            self._state.folder = before

    def given(self, node: dict[str, Any], name: str) -> Any:
        """What a connected input of a node gets."""
        return self.output(*self.source(node, name))

    def sweep(self) -> Any:
        """The finished sweep of its node, which draws images of it."""
        (node,) = self.of("FastARSweep")
        plan = {k: v for k, v in self._run.values(node, {}).items() if k not in ("cell_size", "measure")}
        sockets = {name: self.given(node, name) for name in ("model", "condition")}

        nodes = import_module("fastar_nodes.nodes.sweep")
        with self._in_folder():
            found, _ = nodes.run(nodes.SweepNode, **sockets, **plan)
        return found

    def saved(self) -> np.ndarray:
        """The image of the first node that saves one, uint8 [H, W, 3]."""
        return pixels(self.given(self.of("SaveImage")[0], "images"))


def drawing(path: Path) -> Image.Image:
    """The thumbnail of a template."""
    template = Template(path)
    size = re.search(r"download of \S+ GB(?: or more)?", path.stem)
    if size:
        given = [pixels(template.given(node, "image")) for node in template.of("FastARImageAndPrompt")]
        return _arranged([*given, _sign()], size.group())

    return _arranged(_images(template), _line(template))


def _images(template: Template) -> list[np.ndarray]:
    """What a template draws, each uint8 [H, W, 3]."""
    if template.of("FastARSweep"):
        sweep = template.sweep()
        cells = [sweep.store.read(cell.key) for cell in sweep.cells[:4]]
        return [images[0] for images, _ in cells]

    if races := template.of("FastARTimeLapse"):
        # The moment at which the second run ends.
        reports = _reports(template, races[0])
        share = reports[1].counts["transformer_passes"] / reports[0].counts["transformer_passes"]
        runs = zip(("image_1", "image_2"), reports, (share, 1.0), strict=True)
        return [_begun(template.given(races[0], name), report, part) for name, report, part in runs]

    if comparisons := template.of("FastARCompare"):
        shown = [template.given(comparisons[0], name) for name in _connected(comparisons[0], "image")]
        return [pixels(image) for image in shown] if len(shown) > 1 else [*to_bytes(shown[0])]

    if advisors := template.of("FastARAdvisor"):
        # What it recommends is another sampler on another machine: the plain sampler's image only.
        running = import_module("fastar_nodes.nodes.running")
        model, condition = (template.given(advisors[0], name) for name in ("model", "condition"))
        images, _ = running.draw_images(choose(running.baseline_of(model), {}), model, condition, SEED)
        return [images[0]]

    if crops := template.of("FastARCropAroundMask"):
        (edit,) = template.of("FastARPasteInpaintedArea")
        return [pixels(template.given(crops[0], "image")), pixels(template.output(edit))]

    return [template.saved()]


def _line(template: Template) -> str:
    """The figure of a template, which does not depend on the machine, or the words that it reads."""
    for kind in ("FastARTimeLapse", "FastARCompare"):
        for node in template.of(kind):
            plain, *others = _reports(template, node)
            if len(others) > 2:
                return f"{1 + len(others)} samplers, one seed"
            gains = [
                gain.text.replace(" instead of ", ", not ") for gain in (fewer_calls(r, plain) for r in others) if gain
            ]
            return " ".join(gains) or alone(plain)

    if template.of("FastARSweep"):
        sweep = template.sweep()
        return f"{len(sweep.cells)} values of {sweep.x.name}"

    if advisors := template.of("FastARAdvisor"):
        running = import_module("fastar_nodes.nodes.running")
        baseline = running.baseline_of(template.given(advisors[0], "model"))
        return f"{len(candidates(baseline, draft=False))} settings tried"

    if template.of("FastARCropAroundMask"):
        return "before, and after"

    (prompt,) = [*template.of("FastARPrompt"), *template.of("FastARTarPrompt")]
    return prompt["widgets_values"][0]


def _connected(node: dict[str, Any], kind: str) -> list[str]:
    """The connected inputs of a node that begin with a word."""
    return [
        socket["name"] for socket in node["inputs"] if socket["name"].startswith(kind) and socket["link"] is not None
    ]


def _reports(template: Template, node: dict[str, Any]) -> list[Any]:
    """The reports that a node gets."""
    return [template.given(node, name) for name in _connected(node, "report")]


def pixels(images: Any) -> np.ndarray:
    """The first image of a batch."""
    return to_bytes(images)[0]


def _begun(image: Any, report: Any, share: float) -> np.ndarray:
    """An image after a share of its passes, the tokens to come in grey."""
    shown = pixels(image).copy()
    step = np.asarray(report.maps["step"])[0]
    cell = shown.shape[0] // step.shape[0]
    to_come = np.kron(step >= share * (step.max() + 1), np.ones((cell, cell), bool))
    shown[to_come] = GREY
    return shown


def _arranged(images: Sequence[np.ndarray], text: str) -> Image.Image:
    """The images above a line of text.

    One image fills the width. Two lie one over the other; of three, the first and the last do. Four stand in two rows,
    and more make a contact sheet.
    """
    canvas = Canvas(SIDE, SIDE)
    lines, size = _fitting(text)
    height = SIDE - len(lines) * line_height(size) - MARGIN
    if len(images) > 4:
        sheet = contact_sheet(np.stack(images))
        height = SIDE * sheet.shape[0] // sheet.shape[1]
        canvas.paste(resize(sheet, SIDE, height), 0, 0)
    elif len(images) == 4:
        _four(canvas, images, height)
    elif len(images) in (2, 3):
        _two(canvas, [images[0], images[-1]], height)
    else:
        canvas.paste(resize(images[0], SIDE, SIDE)[:height], 0, 0)

    top = height + (SIDE - height - len(lines) * line_height(size)) / 2
    for n, line in enumerate(lines):
        canvas.write(SIDE / 2, top + n * line_height(size), line, size, before=0.5)
    return canvas.image


def _fitting(text: str) -> tuple[list[str], int]:
    """The text as one line, or as two if it is long, and its font size."""
    for size in TEXT:
        if text_width(text, size) <= SIDE - MARGIN:
            return [text], size

    return wrap(text, TEXT[-1], SIDE - MARGIN, 2), TEXT[-1]


def _two(canvas: Canvas, images: Sequence[np.ndarray], height: int) -> None:
    """Draw an image and, over its lower right corner, another one."""
    side = round(OF_TWO * SIDE)
    side = min(side, height)
    x, y = SIDE - side, height - side
    canvas.paste(resize(images[0], side, side)[:height], 0, 0)
    canvas.draw.rectangle((x - 2 * GAP, y - 2 * GAP, SIDE, height), fill=Ink.BACKGROUND)
    canvas.paste(resize(images[1], side, side), x, y)


def _four(canvas: Canvas, images: Sequence[np.ndarray], height: int) -> None:
    """Draw four images in two rows, without what is above and below the room of a row."""
    side, room = (SIDE - 2 * GAP) // 2, height // 2 - GAP
    above = (side - room) // 2
    for k, image in enumerate(images):
        row, column = divmod(k, 2)
        shown = resize(image, side, side)[above : above + room]
        canvas.paste(shown, column * (SIDE - side), row * (height - room))


def _sign() -> np.ndarray:
    """An arrow into a tray, for a model that is not part of the package."""
    canvas = Canvas(SIDE, SIDE)
    pen = canvas.draw
    colour = (95, 184, 214)
    pen.rectangle((232, 96, 280, 250), fill=colour)
    pen.polygon([(156, 240), (356, 240), (256, 350)], fill=colour)
    pen.line([(120, 330), (120, 410), (392, 410), (392, 330)], fill=colour, width=28, joint="curve")
    return canvas.pixels


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help="number of a template, for example 9; default all")


def run(options: argparse.Namespace) -> int:
    """Draw; returns the exit code."""
    asked = {number.zfill(2) for number in options.numbers}

    for path in sorted(FOLDER.glob("*.json")):
        if asked and path.stem[:2] not in asked:
            continue
        drawing(path).save(path.with_suffix(".jpg"), quality=QUALITY, optimize=True)
        print(path.stem, flush=True)

    return 0
