"""Nodes that pass results on: the report of a saved image, and a sampler from one line of text."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from comfy_api.v0_0_2 import io

from ..errors import UserError
from ..model_loaders.catalogue import hub
from ..networks.torch_state import in_own_state
from ..reports.exchange import read_runs
from ..reports.record import Report, to_table
from ..reports.table import literal
from ..runs.choice import choose, parse_choice
from ..runs.labels import unknown_words
from ..runs.loading import LATENT_SAMPLERS
from ..runs.registry import find
from ..samplers.tokens.mulosd.drafting import BICUBIC
from . import host
from .host.images import to_image
from .running import ModelFirst, expect_pair, reported, run_choice, texts_of
from .samplers import sampled
from .schema import ANY_DRAFT, ANY_SOCKETS, HIDDEN, REPORT, SEED, output, schema, seed_widget, validity


class LoadReport(io.ComfyNode):
    more = {
        "image": "The file may be in ComfyUI's input, output or temp folder.",
    }
    more_of_outputs = {
        "image": "For an animation, this is the first frame.",
        "table": (
            "If the node Compare compared the runs, the table also states PSNR, SSIM and speed-up of each run, "
            "relative to the baseline (the run with which Compare compared the other runs)."
        ),
        "samplers": (
            "If you use the same model, condition and seed again, Any Sampler generates the same image from the line. "
            "But a line cannot repeat a run that inpainted an image, enlarged a draft with an upscale model, or used "
            "settings that this version of FastAR does not have."
        ),
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = host.folders.input_images()
        saved_image = io.Combo.Input(
            "image",
            options=names,
            upload=io.UploadType.image,
            image_folder=io.FolderType.input,
            tooltip="A PNG, WebP or JPEG file that ComfyUI saved in a run with a FastAR sampler. Drop the file on this "
            "node, or upload it.",
        )

        outputs = [
            output(io.Image, "image", "The image."),
            output(
                REPORT,
                "reports",
                "One report per run, for the nodes Compare and Report. Token Map and Time-lapse cannot use a saved "
                "report, because a saved report does not state in which pass each token was decided.",
                is_output_list=True,
            ),
            output(io.String, "table", "The numbers of all runs as a Markdown table."),
            output(
                io.String,
                "samplers",
                "The sampler and settings of each run, as one line of text. Connect it to the node Any Sampler.",
                is_output_list=True,
            ),
        ]

        return schema(
            node_id="FastARLoadReport",
            display_name="Load Report",
            category="FastAR/compare",
            description="Reads the reports of the samplers from an image that ComfyUI saved: seconds, passes, "
            "accepted drafts, settings. The node generates no image.",
            search_aliases=["png info", "read metadata", "image metadata", "drop image"],
            widgets=[saved_image],
            outputs=outputs,
        )

    @classmethod
    def validate_inputs(cls, image: Any) -> bool | str:
        """Uploaded files are not on the menu that was sent to the editor."""
        return validity(host.folders.input_image, image, "image")

    @classmethod
    def fingerprint_inputs(cls, image: Any) -> str:
        """A file that is replaced under its name is read again."""
        about = os.stat(host.folders.input_image(str(image)))
        return f"{about.st_size} {about.st_mtime_ns}"

    @classmethod
    @in_own_state
    def execute(cls, image: str) -> io.NodeOutput:
        shown, reports, labels, quality, baselines = read_runs(host.folders.input_image(str(image)))

        names = [label or report.sampler for label, report in zip(labels, reports, strict=True)]
        table = to_table(reports, names, baselines, quality)
        lines: list[str] = []
        lacking: list[str] = []
        for name, report in zip(names, reports, strict=True):
            line, lacks = line_of(report)
            lines.append(line)
            if lacks:
                lacking.append(f"{literal(name)}: the line does not repeat this run in the node Any Sampler. {lacks}.")

        batch = np.asarray(shown)[None]
        return io.NodeOutput(to_image(batch), reports, table, lines, ui=host.text.output([], lacking))


def line_of(report: Report) -> tuple[str, str]:
    """A run as a line for Any Sampler, and why the line does not repeat the run, "" if it does.

    With the same model, draft model, condition and seed the line gives the same image.
    """
    try:
        find(report.sampler)
    except UserError:
        return literal(report.sampler), "This version of FastAR does not have the sampler of this run"

    # What a line can hold. None is the model's own value.
    written: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in report.settings.items():
        if value is None or name == "up_sampler":
            continue
        try:
            choose(report.sampler, {name: value})
            written[name] = value
        except UserError:
            unknown.append(literal(name))

    # What it cannot hold.
    lacks = ""
    enlarged = report.settings.get("up_sampler", BICUBIC)
    found_again = {BICUBIC, *(entry.id for entry in hub.entries(LATENT_SAMPLERS) if entry.built_in)}
    if unknown:
        lacks = f"This version of FastAR does not have some settings of this run ({', '.join(unknown)})"
    elif enlarged not in found_again:
        node = f"{find(report.sampler).title} Sampler"
        upscaler = literal(str(enlarged))
        lacks = f"{upscaler} enlarged the draft; use {node} with {upscaler}"
    elif report.edits:
        lacks = "The run regenerated a part of an image; use the sampler's own node with the same image and mask"

    return choose(report.sampler, written).text, lacks


_SAMPLER = "fasthybrid: preset=balanced"


class AnySampler(ModelFirst):
    more = {
        "sampler": (
            "An example is *fasthybrid: preset=fast, threshold=0.9*. Type the line, or connect an output of the node "
            "*Advisor* or *Load Report*. The names of the samplers are the same as on the command line: *mar*, "
            "*fasthybrid*, *lazymar*, *cspd*, *gtr*, *llamagen*, *tar*, *par*, *zipar*, *mulosd*, *bitdance* and "
            "*nextstep*. Samplers that use LazyMAR Cache are named *fasthybrid+lazymar*, *gtr+lazymar* and "
            "*cspd+lazymar*."
        ),
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        sampler = io.String.Input(
            "sampler",
            default=_SAMPLER,
            optional=True,
            multiline=True,
            tooltip="One line of text: the name of a sampler, then a colon, then settings in the form name=value, with "
            "commas between the settings; most samplers have the presets exact, balanced and fast. A setting that you "
            "leave out gets the value of the preset. If the preset has no value for the setting, the setting gets the "
            "value of the model's file, or else the usual value.",
        )

        return schema(
            node_id="FastARAnySampler",
            display_name="Any Sampler",
            category="FastAR/sample",
            description="Runs a sampler that is written as text with its settings, such as fasthybrid: preset=fast, "
            "threshold=0.9. Type the line, or connect Advisor or Load Report.",
            search_aliases=["sampler from text", "apply settings", "advised sampler"],
            hidden=HIDDEN,
            sockets=ANY_SOCKETS,
            widgets=[sampler, seed_widget()],
            optional=[ANY_DRAFT],
            outputs=sampled(),
        )

    @classmethod
    def validate_inputs(cls, sampler: Any = None) -> bool | str:
        """The error of a typed line."""
        return validity(lambda line: parse_choice(line, "sampler"), sampler, "sampler")

    @classmethod
    @in_own_state
    def execute(
        cls, model: Any, condition: Any, sampler: Any = _SAMPLER, seed: Any = SEED, draft: Any = None
    ) -> io.NodeOutput:
        choice = parse_choice(str(sampler), "sampler")
        loaded, small = expect_pair(model, draft)

        made = run_choice(choice, loaded, condition, seed, small)
        return reported(cls, made, unknown=unknown_words(loaded.model, texts_of(condition)))


NODES: list[type[io.ComfyNode]] = [LoadReport, AnySampler]
