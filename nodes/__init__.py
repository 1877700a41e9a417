"""ComfyUI nodes, one file per topic. ComfyUI is not imported before :func:`make_extension` is called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..errors import first_line

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension


def make_extension() -> ComfyExtension:
    """The extension for ComfyUI's loader. Registers the model folders, so that menus can list them.

    What is raised here ends the loading of this pack; ComfyUI writes it to its log and goes on.
    """
    from comfy_api.latest import ComfyExtension, io

    from . import host

    host.register_folders()
    from . import advisor, asking, compare, conditioning, editing, filling, loaders, samplers, sharing, sweep, timelapse

    serve = partial(host.serve, filling.PATH, filling.answer, filling.MOST_BYTES)
    _try(serve, "presets do not fill in their numbers in the editor")
    _try(host.watch_prompts, "labels that the connected model does not know are refused when the node runs")

    modules = (loaders, conditioning, samplers, editing, asking, compare, timelapse, sweep, sharing, advisor)

    class FastARExtension(ComfyExtension):
        """Every node of the pack."""

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            nodes: list[type[io.ComfyNode]] = []
            for module in modules:
                nodes += module.NODES

            return nodes

    return FastARExtension()


def _try(register: Callable[[], None], otherwise: str) -> None:
    """Register with ComfyUI what the nodes can do without; ``otherwise`` says in the log what is missing."""
    try:
        register()
    except Exception as problem:  # of whatever ComfyUI this is
        logging.warning("FastAR: %s (%s)", otherwise, first_line(problem))
