"""The prompt that runs, those that wait, and what their client understands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from comfy.cli_args import args
from comfy_execution.graph_utils import ExecutionBlocker as ExecutionBlocker  # for sweep.py
from comfy_execution.utils import get_executing_context
from server import PromptServer


def hidden(node: Any, name: str) -> Any:
    """A hidden input of a node; None outside of ComfyUI's execution."""
    return None if node.hidden is None else getattr(node.hidden, name)


def number_of(node: Any) -> str:
    """Id of a node that runs or is checked, in its graph. A node that asks ComfyUI for it has a text in the editor."""
    number = hidden(node, "unique_id")
    context = get_executing_context()
    return str(context.node_id if number is None and context is not None else number)


def prompt_id() -> str:
    """Id of the run of the graph; "" outside of one."""
    context = get_executing_context()
    return "" if context is None else str(context.prompt_id)


# Values of the editor's setting *Live preview method* and of ComfyUI's option --preview-method.
_NO_PREVIEWS = "none"
_AS_SERVER = "default"


def _queue() -> tuple[Sequence[Any], Sequence[Any]]:
    """The prompts that run and those that wait: (priority, id, prompt, extra data, ids of output nodes, ...) each.

    There are none in a script, which may call nodes without a server.
    """
    server = getattr(PromptServer, "instance", None)
    return ([], []) if server is None else server.prompt_queue.get_current_queue_volatile()


def waiting_prompts() -> list[tuple[Mapping[str, Any], Sequence[str], Any]]:
    """The graphs that wait, each with the ids of the output nodes that will run and what the client sent beside it."""
    _, waiting = _queue()
    return [(nodes, ends, extra) for _, _, nodes, extra, ends, *_ in waiting]


def is_output(kind: str) -> bool:
    """Whether nodes of a type run by themselves, without a node that waits for their result."""
    registered = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return bool(getattr(registered.get(kind), "OUTPUT_NODE", False))


def _queued() -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The prompt that runs, and what the client sent beside it; None outside of a run.

    ComfyUI offers them to nodes nowhere else than in the entries of its queue.
    """
    running, _ = _queue()

    for _, number, prompt, extra, *_ in running:
        if number == prompt_id():
            return prompt, extra if isinstance(extra, Mapping) else {}
    return None


def _extra_data() -> Mapping[str, Any] | None:
    """What the client sent beside the prompt that runs; None outside of a run."""
    queued = _queued()
    return None if queued is None else queued[1]


def running_inputs() -> Mapping[str, Any]:
    """Inputs of the node that runs, by name; empty outside of a run, and for a node that another one has added."""
    queued, context = _queued(), get_executing_context()
    if queued is None or context is None:
        return {}

    prompt, _ = queued
    return prompt.get(context.node_id, {}).get("inputs", {})


def from_editor() -> bool:
    """Whether the prompt that runs was queued in the editor, which shows previews and texts; True outside of a run.

    Other clients take every binary message for an image of the result. The editor sends its graph, to be saved with the
    images, and its connection said that it understands messages about nodes.
    """
    extra = _extra_data()
    if extra is None:
        return True

    saved = extra.get("extra_pnginfo")
    if not isinstance(saved, Mapping) or saved.get("workflow") is None:
        return False

    connection = PromptServer.instance.sockets_metadata.get(str(extra.get("client_id")), {})
    return bool(connection.get("feature_flags", {}).get("supports_preview_metadata"))


def previews_wanted() -> bool:
    """Whether previews are sent: if a method is chosen, in the editor or on the command line, or for the editor.

    By default, the command line has none. It counts as on in the editor, whose setting can switch previews off.
    """
    extra = _extra_data()
    if extra is None:
        return True

    asked = extra.get("preview_method") or _AS_SERVER
    if asked != _AS_SERVER:
        return asked != _NO_PREVIEWS

    return args.preview_method.value != _NO_PREVIEWS or from_editor()


def preview_size() -> int:
    """Longest side of a preview, by ComfyUI's option --preview-size."""
    return args.preview_size
