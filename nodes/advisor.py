"""The Advisor: which accelerator suits the user's model, device and batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from comfy_api.v0_0_2 import io

from ..memory import enough_memory
from ..networks.torch_state import in_own_state
from ..reports.grid import compare_grid
from ..reports.record import Report
from ..runs.advice import Advice, calibrate, candidates
from ..runs.advice_text import limit_of, time_left
from ..runs.choice import Choice, choose
from ..runs.measured import AdviceSettings
from ..runs.presets import CUSTOM
from ..runs.registry import find
from ..samplers.settings import settings_from
from . import host
from .host.images import to_image
from .preview import Bar, show_images
from .running import ModelFirst, baseline_of, draw_images, expect_pair, warm_up
from .schema import ANY_DRAFT, ANY_SOCKETS, HIDDEN, SEED, checked_seed, output, schema, seed_widget, widgets


class Advisor(ModelFirst):
    more = {
        "condition": "Advisor measures batches with one image for each entry of the condition.",
        "draft": "If you connect a draft model, Advisor also tries CSpD or MuLo-SD, whichever works with the model.",
    }
    more_of_outputs = {
        "sampler": (
            "An example is *fasthybrid: preset=fast*. If no sampler within the limit is faster than the unaccelerated "
            "sampler, Advisor recommends the unaccelerated sampler."
        ),
        "table": "For each sampler, the table has the median, the lowest and the highest speed-up of the repeats.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [
            output(io.String, "sampler", "The recommended sampler as text for Any Sampler."),
            output(io.String, "table", "The recommendation and all candidates as a Markdown table."),
            output(
                io.Image,
                "image",
                "The image of the unaccelerated sampler and the image of the recommended sampler, side by side, with "
                "the numbers of the table.",
            ),
        ]

        return schema(
            node_id="FastARAdvisor",
            display_name="Advisor",
            category="FastAR/compare",
            description="Measures on your computer how fast each accelerated sampler runs the model. It recommends "
            "the fastest sampler whose images stay close enough to the images without acceleration.",
            search_aliases=["recommend settings", "calibrate", "auto tune", "which sampler", "fastest"],
            hidden=HIDDEN,
            sockets=ANY_SOCKETS,
            widgets=[*widgets(AdviceSettings), seed_widget(more="")],
            optional=[ANY_DRAFT],
            outputs=outputs,
        )

    @classmethod
    @in_own_state
    def execute(cls, model: Any, condition: Any, seed: Any = SEED, draft: Any = None, **values: Any) -> io.NodeOutput:
        settings = settings_from(AdviceSettings, values)
        first_seed = checked_seed(seed)
        loaded, small = expect_pair(model, draft)

        bar = Bar()

        def draw(choice: Choice, at: int) -> tuple[np.ndarray, Report]:
            return draw_images(choice, loaded, condition, at, small, bar)

        warm_up(loaded, condition)

        # Run by run, the answer last.
        baseline = baseline_of(loaded)
        tried = candidates(baseline, small is not None)
        steps = calibrate(choose(baseline, {}), tried, draw, settings, first_seed)
        while True:
            try:
                at = next(steps)
            except StopIteration as end:
                advice = end.value
                break
            bar.begin(at.done, at.planned)
            rest = time_left(at.seconds_left)
            host.text.show(cls, f"run {at.done + 1} of about {at.planned}{f', {rest}' if rest else ''}: {at.line}")

        with enough_memory(
            "image: there is not enough memory to generate the images; connect a condition for fewer images."
        ):
            image = to_image(_drawn(advice, baseline, settings)[None])

        # The last run was of any candidate; the preview that stays is of the answer.
        show_images(advice.shown[-1].images)
        lines = [advice.sentence, _in_a_graph(advice.best, baseline)]
        return io.NodeOutput(advice.best.text, advice.table, image, ui=host.text.output(lines))


def _in_a_graph(best: Choice, baseline: str) -> str:
    """How the answer is used in a graph of the user's own; "" of the plain sampler."""
    if best.entry.name == baseline and not best.values and best.preset == CUSTOM:
        return ""

    # If it has its own settings, the text is for Any Sampler, because a sampler's node has numbers for all of them.
    if best.values or best.preset == CUSTOM:
        return f"In your workflow, use the node Any Sampler with the text {best.text}."

    sampler, _, cache = best.entry.name.partition("+")
    used = f"{find(sampler).title} Sampler with preset {best.preset}"
    if cache:
        used += f", and connect LazyMAR Cache with preset {best.preset} to its input named cache"
    return f"In your workflow, use {used}."


def _drawn(advice: Advice, baseline: str, settings: AdviceSettings) -> np.ndarray:
    """The images that the answer is about, with its numbers, as in the table: uint8 [H, W, 3]."""
    plain = find(baseline).title
    labels = [plain, advice.best.text][: len(advice.shown)]
    title = f"fastest with {limit_of(settings)}"
    if len(advice.shown) == 1:
        title = f"with {limit_of(settings)}, nothing is measurably faster than {plain}"

    images, reports, quality = (list(part) for part in zip(*advice.shown, strict=True))
    return compare_grid(images, labels, reports, title=title, quality=quality)


NODES: list[type[io.ComfyNode]] = [Advisor]
