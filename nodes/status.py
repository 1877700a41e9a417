"""What a node shows on itself when it has run, and what it adds to the metadata of saved pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io

from ..reports.exchange import add_runs, described
from ..reports.record import Baseline, Qualities, Report
from ..reports.summary import no_gain, one_line
from . import host

MOST_LINES = 8  # on a node


def hidden() -> list[Any]:
    """The hidden inputs that :func:`reported` and :func:`write_reports` need, for ``schema(hidden=...)``."""
    return [io.Hidden.unique_id, io.Hidden.extra_pnginfo, io.Hidden.prompt]


def reported(node: Any, output: io.NodeOutput) -> io.NodeOutput:
    """Write a sampler's report, the second output, to saved pictures; returns ``output``.

    The report is shown on the node unless another node takes it: Compare then shows it beside the others.
    """
    report: Report = output.result[1]
    if not taken(node, 1):
        show(node, [one_line(report), no_gain(report)])
    write_reports(node, [report])
    return output


def show(node: Any, lines: Sequence[str]) -> None:
    """Show lines of text on a node, the class that executes; empty ones are left out."""
    text = "\n".join([line for line in lines if line][:MOST_LINES])
    if text:
        host.show_text(text, _hidden(node, "unique_id"))


def write_reports(
    node: Any,
    reports: Sequence[Report],
    labels: Sequence[str] = (),
    baseline: Baseline | None = None,
    quality: Qualities = (),
) -> None:
    """Add reports to the metadata that core's Save Image writes to the PNG files of this run.

    ComfyUI gives every node of a run the same dictionary. A run whose pictures are queued without a workflow has none.
    """
    metadata = _hidden(node, "extra_pnginfo")
    if isinstance(metadata, dict):
        add_runs(metadata, described(reports, str(_hidden(node, "unique_id") or ""), labels, baseline, quality))


def taken(node: Any, output: int) -> bool:
    """Whether an output of the node is connected in the prompt that runs."""
    prompt, number = _hidden(node, "prompt"), str(_hidden(node, "unique_id"))
    nodes = prompt.values() if isinstance(prompt, dict) else ()
    return any([number, output] == value for other in nodes for value in other.get("inputs", {}).values())


def _hidden(node: Any, name: str) -> Any:
    """A hidden input; None outside of ComfyUI's execution."""
    values = getattr(node, "hidden", None)
    return None if values is None else getattr(values, name, None)
