"""Text on nodes: while they run, and after the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...errors import printable
from ...reports.table import literal
from . import queue

# Lines of text on a node, and characters of each.
MOST_LINES = 8
LONGEST_LINE = 400
# Names in the output of a node for the editor: its text, the parts of it that a subgraph's node shows, and texts for
# the prompts that it sampled. ``web/js/text.js`` reads them. They are not named ``text``, because ComfyUI lists a text
# of that name among the results of a run.
TEXT = "fastar_text"
PARTS = "fastar_text_parts"
PROMPT_TEXTS = "fastar_prompt_texts"
# The event of a remark on a node that may be another's; ``web/js/messages.js`` reads it.
REMARK = "fastar.remark"


def show(node: Any, line: str) -> None:
    """Show a line of text on a node, the class that executes, while it runs, as ComfyUI's API nodes do.

    The editor removes it at the end of the run; :func:`output` is for what stays. For a client that is not the
    editor the line is written to the log.
    """
    number = queue.hidden(node, "unique_id")
    if number is None:
        return

    if queue.from_editor():
        # The classic renderer shows this text as HTML, Nodes 2.0 as Markdown.
        PromptServer.instance.send_progress_text(literal(line, LONGEST_LINE), number)
    else:
        logging.info("FastAR: %s", printable(line, LONGEST_LINE))


def remark(sentence: str) -> None:
    """Say something about the node that runs, which may be one of ComfyUI's: in the log, and as a message in the
    editor.
    """
    text = printable(sentence, LONGEST_LINE)
    logging.warning("FastAR: %s", text)

    context = get_executing_context()
    if context is not None and queue.from_editor():
        server = PromptServer.instance
        server.send_sync(REMARK, {"node": context.node_id, "text": text}, server.client_id)


def output(
    figures: Sequence[str],
    warnings: Sequence[str] = (),
    settings: str = "",
    prompts: Mapping[str, str] | None = None,
) -> dict[str, list[Any]]:
    """What a node says about its run, as the ``ui`` of its output: the editor keeps it on the node and in saved graphs.

    The node shows the warnings, then the figures, then the settings used; the node of a subgraph shows the warnings and
    figures of the nodes inside. The editor shows the characters as they are. ComfyUI stores the text with the result
    and sends it again when the result is reused. For a client that is not the editor the lines are written to the log.

    Args:
        figures, warnings: lines, the most important first.
        settings: the settings used, in a line.
        prompts: texts for other nodes by their id: what the model does not know of their prompts.

    Empty lines are left out; other texts are cut to 8 lines of 400 characters.
    """
    warned = _lines(warnings)[:MOST_LINES]
    counted = _lines(figures)[: MOST_LINES - len(warned)]
    shown = [*warned, *counted, *_lines([settings])][:MOST_LINES]

    others = [[number, printable(text, LONGEST_LINE)] for number, text in (prompts or {}).items()]

    said = [*(text for _, text in others), *shown]
    if said and not queue.from_editor():
        logging.info("FastAR: %s", " ".join(said))

    # ComfyUI joins the lists if a node runs once for each value of a list; all runs must have the same names.
    parts = {"warnings": warned, "figures": counted}
    return {TEXT: ["\n".join(shown)], PARTS: [parts], PROMPT_TEXTS: others}


def _lines(texts: Sequence[str]) -> list[str]:
    """The lines of texts that are not empty, as printable characters."""
    found: list[str] = []
    for text in texts:
        for line in text[: MOST_LINES * LONGEST_LINE].splitlines():
            plain = printable(line, LONGEST_LINE)
            if plain:
                found.append(plain)
    return found
