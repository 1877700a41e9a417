"""Comparison nodes: images side by side, token maps, reports as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from comfy_api.v0_0_2 import io

from ..errors import UserError, amount
from ..memory import enough_memory
from ..networks.torch_state import in_own_state
from ..reports.grid import cell_order, compare_grid
from ..reports.maps import WHAT, token_map
from ..reports.quality import explain_quality
from ..reports.record import Qualities, Report, explain, to_csv, to_json, to_table, to_text
from ..reports.summary import one_line, same_seed
from ..reports.table import literal
from ..runs.baseline import baselines, no_gain, qualities, run_of_report
from ..runs.images import to_bytes
from ..runs.registry import FAMILIES, SAMPLERS, plain_sampler
from ..samplers.settings import Settings, knob, knobs, settings_from
from . import graph, host
from .host.images import to_image
from .metadata import write_reports
from .preview import result_shown
from .schema import HIDDEN, REPORT, expect_image, output, schema, validity, widgets
from .sockets import expect_own

PAIRS = 8  # image and report sockets of Compare
MOST_CELLS = 64
LONGEST_LABEL = 200  # characters
# Pixels of a token map's side, which follows the backdrop's width.
LEAST_MAP = 384
LARGEST_MAP = 1024
# Token maps of workflows that were saved earlier, and what they are now.
_OLD_MAPS = {"drafted": "outcome"}
_REPORTED = "a sampler's report"
# Settings at whose 0 a method is the plain one, which has just its name.
_OFF_AT_0 = ("parallel", "speculation")
# If memory is insufficient.
SHEET = "image: there is not enough memory to show these images; connect fewer or smaller images."


@dataclass(frozen=True)
class CompareSettings(Settings):
    """Widgets of Compare."""

    columns: int = knob(
        0,
        "Number of cells in a row; more cells make the image wider. Usual: 0, which chooses a number from 1 to 4.",
        low=0,
        high=MOST_CELLS,
        step=1,
    )
    baseline: int = knob(
        0,
        "Number of the cell with which all other cells are compared, counted from 1; this cell is shown first. Usual: "
        "0, which chooses the unaccelerated sampler.",
        low=0,
        high=MOST_CELLS,
        step=1,
        more="At 0, each kind of model (such as MAR, LlamaGen and Tar) gets its own group of cells with its own "
        "baseline. Compare divides such a group further, by model and by image size, if each new group has several "
        "cells.",
    )
    differences: bool = knob(
        False,
        "Also shows, below each image, its difference from the baseline's image, amplified four times. Black means "
        "that the pixels are equal.",
    )


def automatic_labels(reports: Sequence[Report | None]) -> list[str]:
    """One label per cell: the method, with the settings that differ between the cells of that method."""
    labels = []
    for i, report in enumerate(reports):
        if report is None:
            labels.append(f"image {i + 1}")
            continue

        own = _settings_of(report)
        same_method = [_settings_of(r) for r in reports if r is not None and r.sampler == report.sampler]
        varied = []
        for name, value in own.items():
            plain = value is None or (name in _OFF_AT_0 and value == 0)
            if not plain and any(other.get(name) != value for other in same_method):
                varied.append(f"{name.replace('_', ' ')} {value}")
        labels.append(f"{_title(report.sampler)} {', '.join(varied)}".strip())

    return labels


def _settings_of(report: Report) -> dict[str, Any]:
    """Settings of a run, the seed among them."""
    return {"seed": report.seed, **report.settings}


def _title(sampler: str) -> str:
    """Display name of a sampler; for a combination that is not registered, the titles of its parts."""
    if sampler in SAMPLERS:
        return SAMPLERS[sampler].title

    titles = [SAMPLERS[part].title if part in SAMPLERS else part for part in sampler.split("+")]
    return " + ".join(titles)


class Compare(io.ComfyNode):
    """Images side by side.

    The schema has all pairs of sockets; ``web/js/compare.js`` shows two and adds one when the last is connected.
    ComfyUI's growing input (Autogrow) moves the later links when one is removed, which would pair an image with the
    numbers of another one. The node takes lists, so one pair holds a whole sweep.
    """

    more = {
        "report_1": "Without a report, the cell shows no numbers.",
        "labels": (
            "If a label has a character that English does not use, FastAR needs a font with this character on the "
            "machine that runs ComfyUI. Without such a font, the image shows the character's code, such as [4E2D]."
        ),
    }
    more_of_outputs = {
        "image": "If this output is not connected, the node itself shows the image. To keep the image, connect Save "
        "Image.",
        "table": "Connect the table to Preview as Text.",
        "images": "Connect the list to Save Image: every image gets a file of its own.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        pairs: list[io.Input] = []
        for i in range(1, PAIRS + 1):
            image = io.Image.Input(
                f"image_{i}",
                optional=i > 1,
                tooltip="The image or the batch of one run, which is shown in one cell. If several runs arrive as a "
                "list, each entry of the list gets a cell of its own.",
            )
            report = REPORT.Input(
                f"report_{i}",
                optional=True,
                tooltip="The report of the sampler whose image is connected to the image input with the same number. "
                "The cell shows the seconds and counts of the report below the image.",
            )
            pairs += [image, report]

        labels = io.String.Input(
            "labels",
            default="",
            optional=True,
            multiline=True,
            placeholder="labels, one line per cell (optional)",
            tooltip="Labels of the cells, one line per cell, in the order of the inputs. If a line is empty, the label "
            "is the name of the sampler. If several cells have the same sampler, the label also states the settings in "
            "which these cells differ.",
        )

        return schema(
            node_id="FastARCompare",
            display_name="Compare (FastAR)",
            category="FastAR/compare",
            description="Shows images side by side, each with its label and its numbers: speed-up, seconds, passes, "
            "accepted drafts, PSNR and SSIM. It also outputs the numbers as a table.",
            search_aliases=[
                "side by side",
                "image grid",
                "contact sheet",
                "xy plot",
                "speed-up",
                "benchmark",
                "compare images",
            ],
            is_input_list=True,
            is_output_node=True,
            hidden=HIDDEN,
            sockets=pairs,
            widgets=[labels, *widgets(CompareSettings)],
            outputs=[
                output(io.Image, "image", "All cells as one image."),
                output(io.String, "table", "The numbers of all reports as a Markdown table."),
                output(
                    io.Image,
                    "images",
                    "The images without labels and numbers, as a list with one entry per cell.",
                    is_output_list=True,
                ),
            ],
        )

    @classmethod
    @in_own_state
    def execute(cls, labels: Any = "", **inputs: Any) -> io.NodeOutput:
        lists = {name: _listed(value) for name, value in inputs.items()}
        typed: dict[str, Any] = {}
        for field, values in lists.items():
            if field in knobs(CompareSettings):
                typed[field] = _first(values, field)
        settings = settings_from(CompareSettings, typed)

        with enough_memory(SHEET):
            images, reports = cells(lists)
        base = cell_baselines(settings.baseline, reports)
        names = cell_names("\n".join(map(str, _listed(labels))), reports)

        with enough_memory(SHEET):
            quality = qualities(images, reports, base)
            grid = compare_grid(
                images,
                names,
                reports,
                settings.columns,
                base,
                quality=quality,
                differences=settings.differences,
            )
            image = to_image(grid[None])

        table, figures, warnings = _tell(cls, reports, names, base, quality)
        said = host.text.output(figures, warnings)
        separate = given_images(lists)
        if not any(isinstance(value, list) for value in inputs.values()):  # a script, whose Save Image gets it whole
            separate = [one for batch in separate for one in batch]

        return io.NodeOutput(image, table, separate, ui={**said, **result_shown(cls, image)})


ELSEWHERE = "(timed in another run)"


def cell_names(labels: str, reports: Sequence[Report | None]) -> list[str]:
    """One label per cell: its line of ``labels`` or the automatic one, and the remark about an earlier run."""
    names = automatic_labels(reports)
    lines = labels.split("\n", len(reports))
    for i, line in enumerate(lines[: len(reports)]):
        typed = line.strip()[:LONGEST_LABEL]
        if typed:
            names[i] = typed

    remarks = _timed_elsewhere(reports)
    return [f"{name} {remark}".strip() for name, remark in zip(names, remarks, strict=True)]


def _timed_elsewhere(reports: Sequence[Report | None]) -> list[str]:
    """A remark for every report of an earlier run of the graph, if the reports are of several runs.

    One run may load weights, another not.
    """
    prompts = [report.prompt for report in reports if report is not None]
    newest = host.queue.prompt_id()
    if newest not in prompts:
        newest = prompts[-1] if prompts else ""

    remarks: list[str] = []
    for report in reports:
        earlier = report is not None and report.prompt != newest
        remarks.append(ELSEWHERE if earlier else "")
    return remarks


def _listed(value: Any) -> list[Any]:
    """The list that ComfyUI passes to a node that takes lists; the plain value that a script passes, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _first(values: list[Any], field: str) -> Any:
    """The value of a widget, which is a list of one."""
    if not values:
        raise UserError(f"{field}: it got an empty list; type a number, or connect a node that outputs a number.")

    return values[0]


def _tell(
    node: Any,
    cells: Sequence[Report | None],
    names: Sequence[str],
    bases: Sequence[int | None],
    quality: Qualities,
) -> tuple[str, list[str], list[str]]:
    """Write all reports to the metadata of saved images.

    Returns the table of the cells that have a report with a line that explains its columns; and what the node shows:
    lines of figures, and warnings: a sentence for each run without a gain, and what to do about different seeds.
    """
    # 1. The cells that have a report, in the order in which they are drawn.
    order: list[int] = []
    reports: list[Report] = []
    for i in cell_order(bases):
        report = cells[i]
        if report is not None:
            order.append(i)
            reports.append(report)

    if not order:
        return "No reports: for each image, also connect the report of its sampler.", [], []

    labels = [names[i] for i in order]
    found = [quality[i] for i in order]
    within: list[int | None] = []  # baselines by their place in this order
    for i in order:
        base = bases[i]
        within.append(None if base is None else order.index(base))

    # 2. The metadata of saved images.
    meanings = "; ".join(filter(None, [explain(reports, within), explain_quality(found)]))
    write_reports(node, reports, labels, within, found, meanings)

    # 3. What to do about different seeds, a sentence for each run without a gain, and the figures of each run that has
    # a baseline.
    figures: list[str] = []
    warnings: list[str] = []
    for k, base in enumerate(within):
        if base is None or base == k:
            continue

        figures.append(f"{labels[k]}: {one_line(reports[k], reports[base], found[k])}")
        sentence = no_gain(reports[k], reports[base])
        if sentence:
            warnings.append(f"{labels[k]}: {sentence}")
        remedy = same_seed(reports[k], reports[base], found[k])
        if remedy and remedy not in warnings:
            warnings.append(remedy)

    # A table that is connected has the same figures.
    shown = [] if graph.taken(node, 1) else figures

    # 4. The table and what its columns mean.
    table = to_table(reports, labels, within, found)
    text = "\n\n".join([table, f"{meanings}.", *map(literal, warnings)])
    return text, shown, warnings


def cells(pairs: dict[str, list[Any]]) -> tuple[list[np.ndarray], list[Report | None]]:
    """Images and reports of all cells, in socket order."""
    images: list[np.ndarray] = []
    reports: list[Report | None] = []
    for i in range(1, PAIRS + 1):
        own_images = _connected(pairs, f"image_{i}")
        own_reports = _connected(pairs, f"report_{i}")
        if own_reports and len(own_reports) != len(own_images):
            raise UserError(
                f"report_{i}: it holds {amount(len(own_reports), 'reports')}, but image_{i} holds "
                f"{amount(len(own_images), 'images')}; connect the report of the sampler that generated image_{i}, or "
                "no report."
            )

        for k, image in enumerate(own_images):
            images.append(to_bytes(expect_image(image, f"image_{i}")))
            if own_reports:
                reports.append(expect_own(own_reports[k], Report, f"report_{i}", _REPORTED))
            else:
                reports.append(None)

    if not images:
        raise UserError("image_1: there is nothing to compare; connect at least one image.")
    if len(images) > MOST_CELLS:
        raise UserError(
            f"image_1: {len(images)} images are too many for one grid; connect at most {MOST_CELLS} images."
        )
    return images, reports


def given_images(pairs: dict[str, list[Any]]) -> list[Any]:
    """The images of all cells as they were connected, in socket order."""
    return [image for i in range(1, PAIRS + 1) for image in _connected(pairs, f"image_{i}")]


def _connected(pairs: dict[str, list[Any]], name: str) -> list[Any]:
    """The values on a socket, which is a list; empty if nothing is connected."""
    return [value for value in pairs.get(name) or [] if value is not None]


def cell_baselines(cell: int, reports: Sequence[Report | None]) -> list[int | None]:
    """For each cell the index of its baseline: ``cell`` counted from 1, for 0 the one that suits its family."""
    if cell > len(reports):
        raise UserError(
            f"baseline: the grid has no cell {cell}; choose the number of a cell, 1 to {len(reports)}, or choose 0 to "
            "let FastAR choose the baseline."
        )

    with_report = [i for i, report in enumerate(reports) if report is not None]
    if cell and with_report and cell - 1 not in with_report:
        raise UserError(
            f"baseline: cell {cell} has no report; connect the report of the image in this cell, or choose 0 to let "
            "FastAR choose the baseline."
        )

    if cell:
        return [cell - 1] * len(reports)
    if not with_report:
        return [0] * len(reports)

    # The runs of the cells that have a report, and a baseline for each.
    known = [report for report in reports if report is not None]
    families = [_family(report, known) for report in known]
    usual = next(filter(None, families), "")  # for samplers that are not registered
    runs = [run_of_report(report, family or usual) for report, family in zip(known, families, strict=True)]

    chosen: dict[int, int] = {}
    for i, k in zip(with_report, baselines(runs), strict=True):
        chosen[i] = with_report[k]

    # With one family, cells without a report keep their place.
    if len(set(chosen.values())) == 1:
        return [chosen[with_report[0]]] * len(reports)

    return [chosen.get(i) for i in range(len(reports))]


def _family(report: Report, reports: Sequence[Report]) -> str:
    """Family of a report's baseline, "" if unknown.

    A sampler of several families belongs to the one whose plain sampler has a report of the same model.
    """
    if report.sampler not in SAMPLERS:
        return ""

    families = SAMPLERS[report.sampler].families
    of_model = {other.sampler for other in reports if other.model == report.model}
    return next((name for name in families if plain_sampler(FAMILIES[name]).name in of_model), families[0])


@dataclass(frozen=True)
class TokenMapSettings(Settings):
    """Widgets of Token Map."""

    what: str = knob(
        WHAT[0],
        "What the colours show: for fixed at step, the step that decided a token; for outcome, what happened to the "
        "token's draft. The help page explains the other choices.",
        choices=WHAT,
        more="\n  - *fixed at step*: the AR step (MAR) or the pass of the transformer (LlamaGen, Tar, PAR, ZipAR, "
        "MuLo-SD) that decided the token.\n  - *order*: the same as *fixed at step*, with the number of the step on "
        "every token.\n  - *outcome*: accepted drafts are blue. Drafts that CSpD or MuLo-SD rejected are vermilion. "
        "Drafts that FastHybrid resampled are orange. The *expanded* drafts of MuLo-SD are orange, too. Tokens without "
        "a draft are dark grey.\n  - *accepted*, *redone* (resampled), *rejected*: only the tokens with this outcome "
        "have a colour.\n  - *cached*: number of AR steps in which the sampler took the token from LazyMAR's cache.\n"
        "  - *tokens per step*: number of tokens that were decided in the same step or pass.\n  - *islands* (MuLo-SD): "
        "connected areas of resampled tokens, each with its own colour and number.\n  - *waves* (MuLo-SD): within each "
        "island, the pass in which the token was resampled.\n  - *expanded* (MuLo-SD): accepted drafts that were "
        "resampled because a draft near them was rejected.",
    )
    opacity: float = knob(
        0.6,
        "Strength of the colours over the image; higher hides more of the image, and 1 shows only the map. Usual: 0.6.",
        low=0.0,
        high=1.0,
        step=0.05,
    )


def _current_map(what: Any) -> Any:
    """The choice of Token Map that replaces a removed choice; any other value unchanged."""
    return _OLD_MAPS.get(str(what), what)


class TokenMap(io.ComfyNode):
    more_of_outputs = {
        "image": "If you connect nothing to this output, the node itself shows the maps.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        report = REPORT.Input("report", tooltip="The report of the sampler that generated the image.")
        image = io.Image.Input(
            "image",
            optional=True,
            tooltip="The decoded images of the same run, which become the background of the maps.",
        )

        return schema(
            node_id="FastARTokenMap",
            display_name="Token Map",
            category="FastAR/compare",
            description="Colours every token of an image by what happened to the token: when it was decided, whether "
            "its draft was accepted, or how often its features came from a cache. A legend is shown below the image.",
            search_aliases=["acceptance map", "heat map", "overlay", "token overlay", "visualise tokens"],
            is_output_node=True,
            hidden=HIDDEN,
            sockets=[report, image],
            widgets=widgets(TokenMapSettings),
            outputs=[output(io.Image, "image", "One map per image.")],
        )

    @classmethod
    def validate_inputs(cls, what: Any = None) -> bool | str:
        """Naming an input here replaces ComfyUI's comparison with the menu, which does not show the maps of older
        workflows.
        """
        return validity(lambda name: TokenMapSettings(what=_current_map(name)), what, "what")

    @classmethod
    @in_own_state
    def execute(cls, report: Any, image: Any = None, **values: Any) -> io.NodeOutput:
        if "what" in values:
            values["what"] = _current_map(values["what"])
        settings = settings_from(TokenMapSettings, values)
        checked = expect_own(report, Report, "report", _REPORTED)

        with enough_memory(SHEET):
            backdrop: np.ndarray | None = None
            side = LEAST_MAP
            if image is not None:
                backdrop = to_bytes(expect_image(image, "image"))
                _, _, width, _ = backdrop.shape
                side = max(LEAST_MAP, min(LARGEST_MAP, width))

            drawn = to_image(token_map(checked, settings.what, backdrop, settings.opacity, side))
            return io.NodeOutput(drawn, ui=result_shown(cls, drawn))


@dataclass(frozen=True)
class ReportSettings(Settings):
    """Widgets of Report."""

    format: str = knob(
        "text",
        "text is for reading, json is for programs, and csv is for a spreadsheet. The help page "
        "explains the names in the report.",
        choices=("text", "json", "csv"),
        more="\n  - *json*: the JSON that the command line writes for a single run.\n  - *csv*: one line with the "
        "names of the columns, and one line with the numbers, without units. The column *acceptance* holds the share "
        "of accepted drafts, as a fraction from 0 to 1.",
    )


class ReportToText(io.ComfyNode):
    more_of_outputs = {
        "text": "Connect it to Preview as Text, or to a node that saves text.",
    }

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARReport",
            display_name="Report (FastAR)",
            category="FastAR/compare",
            description="Writes what a sampler did as text, JSON or CSV: seconds, passes, accepted and rejected "
            "drafts, settings. Connect Preview as Text to read it, or Save Text to keep it.",
            search_aliases=["statistics", "report to json", "report to text", "csv", "numbers"],
            sockets=[REPORT.Input("report", tooltip="The report of a sampler.")],
            widgets=widgets(ReportSettings),
            outputs=[output(io.String, "text", "The report in the chosen format.")],
        )

    @classmethod
    @in_own_state
    def execute(cls, report: Any, **values: Any) -> io.NodeOutput:
        settings = settings_from(ReportSettings, values)
        checked = expect_own(report, Report, "report", _REPORTED)

        if settings.format == "json":
            return io.NodeOutput(to_json([checked]))
        if settings.format == "csv":
            return io.NodeOutput(to_csv(checked))
        return io.NodeOutput(to_text(checked))


NODES: list[type[io.ComfyNode]] = [Compare, TokenMap, ReportToText]
