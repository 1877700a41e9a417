"""Comparison nodes: pictures side by side, token maps, reports as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io
from torch import Tensor

from ..errors import UserError
from ..memory import enough_memory
from ..reports.grid import cell_order, compare_grid
from ..reports.maps import WHAT, token_map
from ..reports.quality import explain_quality
from ..reports.record import Qualities, Report, explain, to_csv, to_json, to_table, to_text
from ..reports.summary import no_gain, one_line
from ..samplers.baseline import baselines, of_report, qualities
from ..samplers.registry import SAMPLERS, TAR
from ..samplers.settings import Settings, knob, knobs, make
from . import host
from .samplers import write_reports
from .schema import HIDDEN, REPORT, expect, expect_image, output, schema, widgets

PAIRS = 8  # image and report sockets of Compare
MOST_CELLS = 64
_REPORTED = "a sampler's report"
# If memory is insufficient.
SHEET = "image: memory is insufficient to draw these pictures; connect fewer or smaller ones."


def to_image(pictures: np.ndarray) -> Tensor:
    """uint8 [B, H, W, 3] to an IMAGE."""
    return host.to_output(torch.from_numpy(np.array(pictures)).float() / 255)


@dataclass(frozen=True)
class CompareSettings(Settings):
    """Widgets of Compare."""

    # A field is its default and sentence, then its range.
    # fmt: off
    columns: int = knob(0, "Cells a row; more makes the picture wider. 0 chooses, at most four.", low=0, high=MOST_CELLS, step=1)
    baseline: int = knob(0, "Which cell the speed-ups are measured against, counted from 1 in the order of the inputs. It is drawn first. "
        "0 takes the plain sampler, else the accelerator at its exact setting, else the slowest; MAR samplers, token samplers on "
        "LlamaGen and those on Tar have one each.", low=0, high=MOST_CELLS, step=1)
    differences: bool = knob(False, "Also draw, below each picture, its difference from the baseline's, four times amplified; black is "
        "equal.")
    # fmt: on


def automatic_labels(reports: Sequence[Report | None]) -> list[str]:
    """One label per cell: the method, with the settings that differ between the cells of that method."""
    labels = []
    for i, report in enumerate(reports):
        if report is None:
            labels.append(f"picture {i + 1}")
            continue
        own = {"seed": report.seed, **report.settings}
        others = [{"seed": r.seed, **r.settings} for r in reports if r is not None and r.sampler == report.sampler]
        varied = [k for k, v in own.items() if any(o.get(k) != v for o in others)]
        named = ", ".join(f"{k.replace('_', ' ')} {own[k]}" for k in varied)
        labels.append(f"{_title(report.sampler)} {named}".strip())
    return labels


def _title(sampler: str) -> str:
    """Display name of a sampler; of a combination that is not registered those of its parts."""
    if sampler in SAMPLERS:
        return SAMPLERS[sampler].title
    return " + ".join(SAMPLERS[part].title if part in SAMPLERS else part for part in sampler.split("+"))


class Compare(io.ComfyNode):
    """Pictures side by side.

    The schema has all pairs of sockets; ``web/js/compare.js`` shows two and adds one when the last is connected. ComfyUI's growing
    input (Autogrow) moves the later links when one is removed, which would pair a picture with the numbers of another one. The node
    takes lists, so one pair holds a whole sweep.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        pairs: list[io.Input] = []
        for i in range(1, PAIRS + 1):
            pairs.append(
                io.Image.Input(
                    f"image_{i}",
                    optional=i > 1,
                    tooltip=f"Picture or batch {i}; a list (of a sweep, say) fills a cell an entry. One cell shows a batch as a sheet.",
                )
            )
            pairs.append(
                REPORT.Input(
                    f"report_{i}",
                    optional=True,
                    tooltip=f"The report of the sampler that made image_{i}: its numbers stand under it.",
                )
            )
        labels = io.String.Input(
            "labels",
            default="",
            multiline=True,
            placeholder="labels, one line a picture (optional)",
            tooltip="One line a cell, in the order of the inputs. An empty line takes the method's name, with the settings in "
            "which cells of one method differ.",
        )
        return schema(
            node_id="FastARCompare",
            display_name="Compare (FastAR)",
            category="FastAR/compare",
            description="Pictures side by side, each with its label above and its numbers underneath: speed-up against the "
            "baseline, seconds, transformer passes, head calls, acceptance, PSNR and SSIM. Also gives the numbers as a table.",
            search_aliases=["side by side", "image grid", "xy plot", "speed-up", "benchmark", "compare images"],
            is_input_list=True,
            hidden=HIDDEN,
            sockets=pairs,
            widgets=[labels, *widgets(CompareSettings)],
            outputs=[
                output(io.Image, "image", "All cells as one picture."),
                output(io.String, "table", "The numbers of all reports as a Markdown table."),
            ],
        )

    @classmethod
    def execute(cls, labels: list[str], **inputs: list[Any]) -> io.NodeOutput:
        given = {field: _first(value, field) for field, value in inputs.items() if field in knobs(CompareSettings)}
        settings = make(CompareSettings, given)
        with enough_memory(SHEET):
            pictures, reports = cells(inputs)
        base = _baselines(settings.baseline, reports)
        names = cell_names("\n".join(map(str, labels)), reports)
        with enough_memory(SHEET):
            quality = qualities(pictures, reports, base)
            about: dict[str, Any] = {"quality": quality, "differences": settings.differences}
            grid = compare_grid(pictures, names, reports, settings.columns, base, explained=True, **about)
            image = to_image(grid[None])
        return io.NodeOutput(image, _tell(cls, reports, names, base, quality))


ELSEWHERE = "(timed in another run)"


def cell_names(labels: str, reports: Sequence[Report | None]) -> list[str]:
    """One label per cell: its line of ``labels`` or the automatic one, and the remark about an earlier run."""
    typed = [line.strip() for line in labels.split("\n")] + [""] * len(reports)
    names = [a or b for a, b in zip(typed, automatic_labels(reports), strict=False)]
    return [f"{a} {b}".strip() for a, b in zip(names, _timed_elsewhere(reports), strict=True)]


def _timed_elsewhere(reports: Sequence[Report | None]) -> list[str]:
    """A remark for every report of an earlier run of the graph, if the reports are of several: one run may load weights, another not."""
    prompts = [report.prompt for report in reports if report is not None]
    newest = host.prompt_id() if host.prompt_id() in prompts else prompts[-1] if prompts else ""
    return [ELSEWHERE if report is not None and report.prompt != newest else "" for report in reports]


def _first(values: Any, field: str) -> Any:
    """The value of a widget, which is a list of one: the node takes lists."""
    if not isinstance(values, (list, tuple)) or not values:
        raise UserError(f"{field}: it got an empty list; type a number, or connect a node that gives one.")
    return values[0]


def _tell(
    node: Any, cells: Sequence[Report | None], names: Sequence[str], bases: Sequence[int | None], quality: Qualities
) -> str:
    """Write all reports to the metadata of saved pictures, and show a line for each run that has a baseline.

    Returns the table of the cells that have a report, a line that explains its columns, and a sentence for each run without a gain.
    """
    order = [i for i in cell_order(bases) if cells[i] is not None]
    if not order:
        return "No reports: connect a sampler's report beside its picture."
    reports = [report for report in (cells[i] for i in order) if report is not None]
    labels, found = [names[i] for i in order], [quality[i] for i in order]
    within = [None if bases[i] is None else order.index(bases[i]) for i in order]
    write_reports(node, reports, labels, within, found)
    lines, bare = [], []
    for k, (report, label, base) in enumerate(zip(reports, labels, within, strict=True)):
        if base is not None and base != k:
            lines.append(f"{label}: {one_line(report, reports[base], found[k])}")
            sentence = no_gain(report, reports[base])
            bare += [f"{label}: {sentence}"] if sentence else []
    if not host.taken(node, 1):  # the table has the same figures
        host.show(node, lines)
    words = "; ".join(filter(None, (explain(reports), explain_quality(found))))
    return "\n\n".join([to_table(reports, labels, within, found), f"{words}.", *bare])


def cells(pairs: dict[str, list[Any]]) -> tuple[list[np.ndarray], list[Report | None]]:
    """Pictures and reports of all cells, in socket order."""
    pictures: list[np.ndarray] = []
    reports: list[Report | None] = []
    for i in range(1, PAIRS + 1):
        images, given = ([x for x in pairs.get(f"{kind}_{i}") or [] if x is not None] for kind in ("image", "report"))
        if given and len(given) != len(images):
            raise UserError(
                f"report_{i}: it holds {len(given)} reports for {len(images)} pictures on image_{i}; connect both outputs of "
                "one sampler, or no report."
            )
        for k, image in enumerate(images):
            pictures.append(host.to_bytes(expect_image(image, f"image_{i}")))
            reports.append(expect(given[k], Report, f"report_{i}", _REPORTED) if given else None)
    if not pictures:
        raise UserError("image_1: there is nothing to compare; connect at least one image.")
    if len(pictures) > MOST_CELLS:
        raise UserError(
            f"image_1: {len(pictures)} pictures are more than the {MOST_CELLS} cells of one grid; compare fewer."
        )
    return pictures, reports


def _baselines(cell: int, reports: Sequence[Report | None]) -> list[int | None]:
    """For each cell the index of its baseline: ``cell`` counted from 1, for 0 the one that suits its family."""
    if cell > len(reports):
        raise UserError(f"baseline: there is no cell {cell}, only {len(reports)}; choose one of them, or 0.")
    with_report = [i for i, report in enumerate(reports) if report is not None]
    if cell and with_report and cell - 1 not in with_report:
        raise UserError(f"baseline: cell {cell} has no report to measure against; connect it, or choose 0.")
    if cell or not with_report:
        return [max(0, cell - 1)] * len(reports)
    families = ["" if r is None else _family(r, reports) for r in reports]
    usual = next(filter(None, families), "")  # for samplers that are not registered
    runs = [of_report(report, families[i] or usual) for i, report in enumerate(reports) if report is not None]
    chosen = {i: with_report[k] for i, k in zip(with_report, baselines(runs), strict=True)}
    # With one family, cells without a report keep their place.
    if len(set(chosen.values())) == 1:
        return [chosen[with_report[0]]] * len(reports)
    return [chosen.get(i) for i in range(len(reports))]


def _family(report: Report, reports: Sequence[Report | None]) -> str:
    """Family of a report's baseline, "" if unknown. A sampler of both token families belongs to Tar if a Tar report has the same model."""
    families = SAMPLERS[report.sampler].families if report.sampler in SAMPLERS else ("",)
    of_tar = any(r is not None and r.sampler == TAR and r.model == report.model for r in reports)
    return TAR if of_tar and TAR in families else families[0]


@dataclass(frozen=True)
class TokenMapSettings(Settings):
    """Widgets of Token Map."""

    # fmt: off
    what: str = knob(WHAT[0], "What to colour. fixed at step: the AR step that decided a token, dark first, yellow last; outcome: "
        "accepted drafts blue, redone or expanded ones orange, rejected ones vermilion, tokens that had no draft dark grey, given ones "
        "black; accepted, redone, rejected, drafted: that one alone; order: the steps as numbers too; cached: at how many AR steps LazyMAR "
        "took the token from its cache; tokens per step: how many tokens were decided together with it; islands: what MuLo-SD drew "
        "again together, a hue each; waves: in which pass of its island, dark first, yellow last; expanded: accepted drafts that were "
        "drawn again beside a rejected one.", choices=WHAT)
    opacity: float = knob(0.6, "Strength of the colours over the picture; higher hides more of it, 1 shows only the map. Usual: 0.6. "
        "Without a picture the map is always opaque.", low=0.0, high=1.0, step=0.05)
    # fmt: on


class TokenMap(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARTokenMap",
            display_name="Token Map",
            category="FastAR/compare",
            description="Colours every token by what happened to it: when it was decided, whether its draft was accepted or "
            "redone, how often it came from a cache. The legend stands underneath; colours are safe for colour-blind eyes.",
            search_aliases=["acceptance map", "heat map", "overlay", "token overlay", "visualise tokens"],
            sockets=[
                REPORT.Input("report", tooltip="The report of the sampler that made the picture."),
                io.Image.Input("image", optional=True, tooltip="The decoded pictures of that run, as backdrop."),
            ],
            widgets=widgets(TokenMapSettings),
            outputs=[output(io.Image, "image", "One map a picture.")],
        )

    @classmethod
    def execute(cls, report: Any, image: Any = None, **values: Any) -> io.NodeOutput:
        settings = make(TokenMapSettings, values)
        checked = expect(report, Report, "report", _REPORTED)
        with enough_memory(SHEET):
            backdrop = None if image is None else host.to_bytes(expect_image(image, "image"))
            side = 384 if backdrop is None else max(384, min(1024, backdrop.shape[2]))
            return io.NodeOutput(to_image(token_map(checked, settings.what, backdrop, settings.opacity, side)))


@dataclass(frozen=True)
class ReportSettings(Settings):
    """Widgets of Report."""

    # fmt: off
    format: str = knob("text", "text: for reading; json: for programs, always the same names (see the help page); csv: one line for a "
        "spreadsheet.", choices=("text", "json", "csv"))
    # fmt: on


class ReportToText(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="FastARReport",
            display_name="Report (FastAR)",
            category="FastAR/compare",
            description="What a sampler did, as text, JSON or CSV: seconds by phase, transformer passes, head calls, accepted "
            "and rejected drafts, settings. Connect Preview as Text or Save Text to see or keep it.",
            search_aliases=["statistics", "report to json", "report to text", "csv", "numbers"],
            sockets=[REPORT.Input("report", tooltip="A sampler's report.")],
            widgets=widgets(ReportSettings),
            outputs=[output(io.String, "text", "The report in the chosen format.")],
        )

    @classmethod
    def execute(cls, report: Any, **values: Any) -> io.NodeOutput:
        settings = make(ReportSettings, values)
        own = expect(report, Report, "report", _REPORTED)
        forms = {"text": lambda: to_text(own), "json": lambda: to_json([own]), "csv": lambda: to_csv([own])}
        return io.NodeOutput(forms[settings.format]())


NODES: list[type[io.ComfyNode]] = [Compare, TokenMap, ReportToText]
