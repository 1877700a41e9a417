"""Reports in the metadata that ComfyUI's nodes save with an image.

ComfyUI gives all nodes of a run one dictionary, ``extra_pnginfo``, and its save nodes write it to the files. A report
would be missing in two cases:

1. A client that is not the editor sends no such dictionary. FastAR adds one to its prompt.
2. ComfyUI reuses the result of a node whose inputs did not change, so the node does not run and writes nothing. FastAR
   remembers what it wrote and all that its result depends on, and adds it to the dictionary of later prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..reports.exchange import MOST_RUNS, add_runs, described
from ..reports.record import Baseline, Qualities, Report
from . import graph, host

MOST_REMEMBERED = 64  # nodes with their inputs
_OURS = "FastAR"  # the beginning of the types of this pack's nodes


@dataclass(frozen=True, eq=False)
class _Written:
    """What a node wrote in a run."""

    number: str  # id of the node
    sources: Mapping[str, Any]  # see :func:`.graph.behind`
    prompt: str  # id of the run
    runs: list[dict[str, Any]]
    explained: str

    def add_to(self, metadata: dict[str, Any], replaced: Iterable[Mapping[str, Any]] = ()) -> None:
        """Add the runs to the metadata of an image, in the place of the runs ``replaced``."""
        add_runs(metadata, self.runs, self.explained, replaced)

    def is_result_in(self, nodes: Mapping[str, Any], running: Iterable[str]) -> bool:
        """Whether the node would have the same result in a graph of which the nodes ``running`` run."""
        return self.number in running and graph.behind(nodes, self.number) == self.sources


# The newest last.
_written: list[_Written] = []


def write_reports(
    node: Any,
    reports: Sequence[Report],
    labels: Sequence[str] = (),
    baseline: Baseline | None = None,
    quality: Qualities = (),
    explained: str = "",
) -> None:
    """Add reports to the metadata that ComfyUI's save nodes write to the image files of this run.

    ``explained``: what a comparison's measures mean.
    """
    number = str(host.queue.hidden(node, "unique_id") or "")
    runs = described(reports, number, labels, baseline, quality)
    sources = graph.behind(graph.graph_of(node), number)
    written = _Written(number, sources, host.queue.prompt_id(), runs, explained)

    # 1. What the node wrote earlier with the same inputs: in this run, for another value of a list, or in a run whose
    #    result ComfyUI has dropped since.
    replaced: list[dict[str, Any]] = []
    for earlier in list(_written):
        if (earlier.number, earlier.sources) != (number, sources):
            continue

        _written.remove(earlier)
        if earlier.prompt == written.prompt:
            written = replace(written, runs=[*earlier.runs, *runs][-MOST_RUNS:])
        else:
            replaced = earlier.runs

    # 2. This run.
    metadata = host.queue.hidden(node, "extra_pnginfo")
    if isinstance(metadata, dict):
        written.add_to(metadata, replaced)

    # 3. Prompts that wait, and those to come; not of a node that is in no graph, because another one has added it.
    if not sources:
        return

    _written.append(written)
    del _written[:-MOST_REMEMBERED]
    for nodes, ends, extra in host.queue.waiting_prompts():
        place = _place_in(extra)
        if place is not None and written.is_result_in(nodes, graph.needed(nodes, ends)):
            written.add_to(place, replaced)


def prepare(request: Any) -> None:
    """Give a prompt that a client sends a place for reports, and what its nodes wrote if their results may be reused.

    Args:
        request: the JSON of the request, of any shape; it is changed.
    """
    nodes = request.get("prompt") if isinstance(request, dict) else None
    if not isinstance(nodes, Mapping):
        return

    # 1. The nodes that will run: all that the output nodes need, or the output nodes that the client names.
    targets = request.get("partial_execution_targets")
    ends: list[str] = []
    for number, entry in nodes.items():
        named = not isinstance(targets, list) or number in targets
        if named and host.queue.is_output(graph.type_of(entry)):
            ends.append(number)
    running = graph.needed(nodes, ends)

    # 2. A place for reports.
    if not any(graph.type_of(nodes[number]).startswith(_OURS) for number in running):
        return
    place = _place_in(request.setdefault("extra_data", {}))
    if place is None:
        return

    # 3. What is known of these nodes; ComfyUI does not say before the run which of them it reuses.
    for written in list(_written):
        if written.is_result_in(nodes, running):
            written.add_to(place)


def _place_in(extra: Any) -> dict[str, Any] | None:
    """The dictionary of a prompt's metadata, made if there is none; None if the client sent something else."""
    if not isinstance(extra, dict):
        return None

    if extra.get("extra_pnginfo") is None:
        extra["extra_pnginfo"] = {}
    place = extra["extra_pnginfo"]
    return place if isinstance(place, dict) else None
