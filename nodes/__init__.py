"""ComfyUI nodes, one file per topic. ComfyUI is not imported before :func:`make_extension` is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension


def make_extension() -> ComfyExtension:
    """The extension for ComfyUI's loader. Registers the model folders, so that menus can list them."""
    from comfy_api.latest import ComfyExtension, io

    from . import host

    host.register_folders()
    from . import (
        advice,
        comparison,
        conditioning,
        hybrid,
        loaders,
        mar_samplers,
        previous,
        sharing,
        sweep_cells,
        sweeps,
        token_samplers,
    )

    class FastARExtension(ComfyExtension):
        """Every node of the pack."""

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            return [
                *loaders.NODES,
                *conditioning.NODES,
                *hybrid.NODES,
                *mar_samplers.NODES,
                *token_samplers.NODES,
                *comparison.NODES,
                *sweeps.NODES,
                *sweep_cells.NODES,
                *sharing.NODES,
                *advice.NODES,
                *previous.NODES,
            ]

    return FastARExtension()
