"""The model or the condition of a node made again with another checkpoint, label or prompt, for axes of Sweep.

The nodes connected to the socket are called again with the inputs that the graph holds for them. So everything else,
such as the decoder, the dtype or a negative prompt, is as in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import UserError
from ..sweeps.plan import CHECKPOINT, LABEL, PROMPT
from . import conditioning, graph, loaders

# For every axis: the socket, and by type of the node behind it what changes there; "" is the place of the value.
_LOADERS = {loader.node_id: {"checkpoint": ""} for loader in loaders.NODES if loader is not loaders.LoadTar}
_CHANGES: dict[str, tuple[str, dict[str, dict[str, str]]]] = {
    CHECKPOINT: ("model", _LOADERS),
    LABEL: ("condition", {"FastARClassLabel": {"labels": "", "add_label": conditioning.NONE}}),
    PROMPT: (
        "condition",
        {name: {"text": ""} for name in ("FastARPrompt", "FastARLlamaGenPrompt", "FastARTarPrompt")},
    ),
}
_NAMES = {
    CHECKPOINT: "the loader of the model",
    LABEL: "Class Label",
    PROMPT: "Prompt (FastAR), LlamaGen Prompt or Tar Prompt",
}


class Remaker:
    """Makes what is on a node's sockets again with other values; nodes that do not change are called once."""

    def __init__(self, node: Any):
        self._node = node
        self._made: dict[str, Any] = {}  # results of unchanged nodes by id

    def made(self, axis: str, value: str) -> Any:
        """The value of the socket of an axis, :data:`CHECKPOINT`, :data:`LABEL` or :data:`PROMPT`, for a value of it.

        Raises:
            UserError: the connected node is a different one, or its inputs are not known here; or what the
                node raises.
        """
        socket, kinds = _CHANGES[axis]
        link = graph.source_of(graph.typed(self._node, socket))
        kind = graph.maker(self._node, socket)
        if link is None or kind not in kinds:
            raise UserError(
                f"{socket}: to sweep over {axis}s, connect {_NAMES[axis]} to {socket}, with no other node between them."
            )

        changes = {name: text or value for name, text in kinds[kind].items()}
        number, output = link
        return self._run(number, changes, socket)[output]

    def _run(self, number: str, changes: Mapping[str, Any], socket: str) -> Any:
        """The outputs of a node of the graph, called with some inputs changed. ``socket``: of the axis, for errors."""
        if not changes and number in self._made:
            return self._made[number]

        entry = graph.graph_of(self._node).get(number)
        name = entry.get("class_type") if isinstance(entry, Mapping) else None
        kind = _nodes().get(str(name))
        if kind is None:
            raise UserError(
                f"{socket}: for each value, the sweep runs the nodes before {socket} again, but it cannot run the node "
                f"{str(name)[:60]!r}; remove this node, and type its value into the next node."
            )

        known = {part.id for part in kind.define_schema().inputs}
        inputs: dict[str, Any] = {}
        for field, value in {**graph.inputs_of(entry), **changes}.items():
            if field not in known:
                continue
            source = graph.source_of(value)
            inputs[field] = value if source is None else self._run(source[0], {}, socket)[source[1]]

        result = kind.execute(**inputs).result
        if not changes:
            self._made[number] = result
        return result


@lru_cache(maxsize=1)
def _nodes() -> dict[str, Any]:
    """The nodes that can be called again, by type."""
    return {kind.define_schema().node_id: kind for kind in [*loaders.NODES, *conditioning.NODES]}
