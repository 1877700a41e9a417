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
    from . import advisor, compare, conditioning, editing, filling, loaders, samplers, sharing, sweep, timelapse

    host.serve(filling.PATH, filling.answer, filling.MOST_BYTES)
    modules = (loaders, conditioning, samplers, editing, compare, timelapse, sweep, sharing, advisor)

    class FastARExtension(ComfyExtension):
        """Every node of the pack."""

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            nodes: list[type[io.ComfyNode]] = []
            for module in modules:
                nodes += module.NODES

            return nodes

    return FastARExtension()
