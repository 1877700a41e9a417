"""Running a sampler in ComfyUI: progress bar, cancellation and live preview. And the result that a node shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from comfy_api.v0_0_2 import ui
from PIL import Image
from torch import Tensor

from ..memory import out_of_memory
from ..reports.drawing import contact_sheet
from ..runs.images import to_bytes
from . import graph, host
from .host.loaded import MOST_IMAGES
from .vae import FastARVAE

R = TypeVar("R")

# Colour of undecided tokens.
GREY = 128
# Smaller previews are enlarged smoothly by an integer factor, to at most this many pixels a side.
LEAST = 256
# Seconds between two previews, at least.
INTERVAL = 0.5
# A preview takes at most one part of this many of the time.
SHARE = 10


class Canvas:
    """Draws previews of a sampler's steps at a bounded cost.

    The interval between previews is at least half a second and at least ten times the duration of the last one.
    """

    def __init__(self, decode: Callable[[Tensor], Tensor]):
        self.decode = decode
        self._next = time.perf_counter() + INTERVAL

    def due(self) -> bool:
        """Whether the next preview is due."""
        return time.perf_counter() >= self._next

    def draw(self, latents: Tensor, decided: Tensor) -> np.ndarray:
        """Decoder latents [B, C, h, w] as an image uint8 [H, W, 3]; of a batch the first four images, two by two.

        Tokens that are not ``decided``, bool [B, gh, gw], are grey.
        """
        known = decided[:MOST_IMAGES].cpu().numpy()  # synchronises, so that only the decoder is timed

        began = time.perf_counter()
        images = to_bytes(self.decode(latents[:MOST_IMAGES]))
        seconds = time.perf_counter() - began
        self._next = time.perf_counter() + max(INTERVAL, SHARE * seconds)

        # The token over every pixel.
        _, height, width, _ = images.shape
        rows = np.arange(height) * known.shape[1] // height
        columns = np.arange(width) * known.shape[2] // width
        pixels = known[:, rows][:, :, columns, None]
        is_decided = np.broadcast_to(pixels, images.shape).astype(np.uint8)

        # The image is enlarged smoothly; the grey tokens keep their edges.
        smooth, factor = _enlarged(images)
        shown = contact_sheet(is_decided, gap=0).repeat(factor, axis=0).repeat(factor, axis=1)
        return np.where(shown == 1, smooth, np.uint8(GREY))


def show_images(images: np.ndarray) -> None:
    """Send finished images uint8 [N, H, W, 3] as the preview, which stays on the node: of a batch the first four."""
    if host.queue.previews_wanted():
        sheet, _ = _enlarged(images[:MOST_IMAGES])
        host.progress.ProgressBar(1).update_absolute(1, 1, ("JPEG", Image.fromarray(sheet), host.queue.preview_size()))


def result_shown(node: Any, images: Tensor) -> dict[str, Any]:
    """The first output of an output node, an IMAGE, as a preview on that node: a part of its ``ui``.

    Empty if the output is connected: the node that takes it shows it.
    """
    return {} if graph.taken(node, 0) else ui.PreviewImage(images, cls=node).as_dict()


def _enlarged(images: np.ndarray) -> tuple[np.ndarray, int]:
    """Images uint8 [N, H, W, 3] as one sheet uint8 [H, W, 3], enlarged if it is small, and the factor."""
    sheet = contact_sheet(images, gap=0)
    height, width, _ = sheet.shape
    factor = max(1, LEAST // max(height, width))
    smooth = Image.fromarray(sheet).resize((width * factor, height * factor), Image.Resampling.BICUBIC)
    return np.asarray(smooth), factor


# Steps of a node's progress bar, whatever the number of runs.
_PARTS = 1000


class Bar:
    """The progress bar of a node that runs samplers one after another, over all runs.

    It never falls, even if the number of runs is an estimate that grows.

    Args:
        previews: whether the node shows the steps of its runs. The editor shows a preview in the place of a result, so
            a node that shows its own images has none.
    """

    def __init__(self, previews: bool = True) -> None:
        self.previews = previews
        self._bar = host.progress.ProgressBar(_PARTS)
        self._ended = 0  # runs
        self._planned = 1
        self._shown = 0  # parts

    def begin(self, ended: int, planned: int) -> None:
        """A run begins, after ``ended`` of ``planned``."""
        self._ended = ended
        self._planned = planned

    def update(self, done: int, total: int, preview: Any = None) -> None:
        """Show the progress of the present run, and a preview in the form that ComfyUI's bar takes."""
        share = (self._ended + done / total) / self._planned
        self._shown = max(self._shown, int(_PARTS * share))
        self._bar.update_absolute(self._shown, _PARTS, preview)


def drive(
    sampler: Generator[Any, None, R],
    vae: FastARVAE | None = None,
    latents: Callable[[Any], Tensor] = attrgetter("latents"),
    bar: Bar | None = None,
) -> R:
    """Run a sampler generator to its end, with progress bar, cancellation and live preview; returns its result.

    Args:
        sampler: yields objects with ``done``, ``total`` and ``decided`` bool [B, gh, gw].
        vae: decoder, on the device; None for no preview.
        latents: from a yielded object to latents [B, C, h, w]; called only for a preview.
        bar: of a node with several runs; None for a bar of this run.
    """
    canvas: Canvas | None = None
    if vae is not None and host.queue.previews_wanted() and (bar is None or bar.previews):
        canvas = Canvas(vae.decode_now)

    update = host.progress.ProgressBar(1).update_absolute if bar is None else bar.update
    try:
        while True:
            # ProgressBar checks too, but it is throttled, which would delay a cancellation by several steps.
            host.progress.stop_if_cancelled()
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value

            shown = None
            if canvas is not None and (canvas.due() or step.done == step.total):
                shown = _preview(canvas, step, latents)
            update(step.done, step.total, shown)
    finally:
        sampler.close()


def _preview(canvas: Canvas, step: Any, latents: Callable[[Any], Tensor]) -> tuple[str, Image.Image, int] | None:
    """The preview argument of ProgressBar; None if memory is insufficient."""
    try:
        drawn = canvas.draw(latents(step), step.decided)
    except RuntimeError as problem:
        if not out_of_memory(problem):
            raise
        return None

    return "JPEG", Image.fromarray(drawn), host.queue.preview_size()
