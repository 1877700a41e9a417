"""ComfyUI nodes, one file per topic. ComfyUI is not imported before one of the functions is called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from ..errors import first_line

if TYPE_CHECKING:
    from comfy_api.v0_0_2 import ComfyExtension, io

    from ..reports.record import Report


def make_extension(module: str = __name__) -> ComfyExtension:
    """The extension for ComfyUI's loader. Registers the model folders, so that menus can list them.

    What is raised here ends the loading of this pack; ComfyUI writes it to its log and continues.

    Args:
        module: the name under which ComfyUI has imported this pack.
    """
    from comfy_api.v0_0_2 import ComfyExtension

    from . import host

    host.folders.register_folders()
    from . import (
        advisor,
        asking,
        compare,
        conditioning,
        editing,
        filling,
        loaders,
        metadata,
        renamed,
        samplers,
        sharing,
        sweep,
        timelapse,
        vocabulary,
    )

    serve = partial(host.server.serve, filling.PATH, filling.answer, filling.MOST_BYTES)
    _try(serve, "presets do not fill in their numbers in the editor")
    serve = partial(host.server.serve, vocabulary.PATH, vocabulary.answer, vocabulary.MOST_BYTES)
    _try(serve, "prompt nodes do not show which words a demo model knows")

    def prepare(request: Any) -> None:
        renamed.convert(request)
        sweep.convert(request)
        metadata.prepare(request)

    watch = partial(host.server.watch_prompts, prepare)
    _try(
        watch,
        "unknown class names raise an error only when the node runs; images are saved without reports if a client "
        "other than ComfyUI's editor requests them; workflows with Sweep Grid or Sweep Plot do not run",
    )

    groups = (loaders, conditioning, samplers, editing, asking, compare, timelapse, sweep, sharing, advisor)

    class FastARExtension(ComfyExtension):
        """Every node of the pack."""

        async def get_node_list(self) -> list[type[io.ComfyNode]]:
            nodes: list[type[io.ComfyNode]] = []
            for group in groups:
                nodes += group.NODES

            await renamed.register(nodes)
            for node in nodes:
                _let_scripts_call(node, module)
            return nodes

    return FastARExtension()


def sample(
    model: Any, condition: Any, sampler: str = "", seed: int = 0, draft: Any = None
) -> tuple[dict[str, Any], Report]:
    """Draw images on the values of sockets, for the nodes of other packs: with progress, previews and cancellation.

    Args:
        model: value of a model socket.
        condition: value of a condition socket, or of a class of another pack that docs/sockets.md describes.
        sampler: name and settings as in Any Sampler, "fasthybrid: preset=balanced, steps=32" for example; "" for the
            plain sampler of the model.
        seed: 0 to 2^64 - 1.
        draft: value of a model socket, for CSpD and MuLo-SD.

    Returns:
        A LATENT, which ``model.vae.decode(latent["samples"])`` turns into an IMAGE, and the value of a report socket.

    Raises:
        UserError: an input that a sampler's node would refuse.
    """
    from ..runs.choice import parse_choice
    from .running import baseline_of, expect_pair, run_choice

    loaded, small = expect_pair(model, draft)
    choice = parse_choice(sampler or baseline_of(loaded), "sampler")
    latent, report = run_choice(choice, loaded, condition, seed, small).result
    return latent, report


def _let_scripts_call(node: type[io.ComfyNode], module: str) -> None:
    """Let a script call a node, as programs such as ComfyUI-to-Python-Extension write it from a graph.

    They import a class from its module if that has a name as in an import statement. ComfyUI imports packs under the
    paths of their folders, and classes of such a module are taken from its table of nodes, as they have to be. They
    also pass the hidden inputs, which ComfyUI passes in a different way, among all other inputs.
    """
    from .schema import HIDDEN

    hidden = {one.name for one in HIDDEN}
    execute = node.execute.__func__

    @wraps(execute)
    def without_hidden(cls: Any, *args: Any, **inputs: Any) -> Any:
        return execute(cls, *args, **{name: value for name, value in inputs.items() if name not in hidden})

    node.execute = classmethod(without_hidden)
    node.__module__ = module


def _try(register: Callable[[], None], otherwise: str) -> None:
    """Register with ComfyUI what the nodes can do without; ``otherwise`` says in the log what is missing."""
    try:
        register()
    except Exception as problem:  # of whatever ComfyUI this is
        logging.warning("FastAR: %s (%s)", otherwise, first_line(problem))
