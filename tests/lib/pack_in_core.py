"""ComfyUI on the device of the tests, with the pack imported as "fastar"; for scripts that run in ComfyUI's own Python.

Arguments of such a script: ComfyUI's folder, the pack's folder, and its own.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from comfy_device import OPTIONS

CORE, PACK, *MORE = sys.argv[1:]
sys.argv = ["main.py", *OPTIONS]
sys.path.insert(0, CORE)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)
_spec = importlib.util.spec_from_file_location(
    "fastar", str(Path(PACK) / "__init__.py"), submodule_search_locations=[PACK]
)
assert _spec is not None and _spec.loader is not None
sys.modules["fastar"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["fastar"])


def module(name: str) -> ModuleType:
    """A module of the pack."""
    return importlib.import_module(f"fastar.{name}")


def run_without_previews() -> None:
    """Let nodes run as in a prompt without previews, whose decoder would be loaded too."""
    from server import PromptServer

    running = [(0, module("nodes.host").queue.prompt_id(), {}, {"preview_method": "none"})]
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, []))
    PromptServer.instance = SimpleNamespace(prompt_queue=queue)
