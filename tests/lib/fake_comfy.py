"""The parts of ComfyUI that the node files use, so that they can be tested without ComfyUI.

Tests in a real ComfyUI are in tests/comfyui.
"""

import sys
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn


class Interrupted(BaseException):
    """Like core's since 0.20: no Exception."""


class Part:
    """Keeps the arguments of a widget, a socket or an output."""

    kind = ""

    def __init__(self, id: str = "", **about: Any):
        self.id, self.about = id, about
        self.optional, self.advanced = bool(about.get("optional")), about.get("advanced")
        self.control_after_generate = about.get("control_after_generate")


def _type(kind: str) -> Any:
    part = type(kind, (Part,), {"kind": kind})
    return SimpleNamespace(Input=part, Output=part)


@dataclass
class Schema:
    """The fields of ComfyUI 0.14."""

    node_id: str
    display_name: str = ""
    category: str = ""
    inputs: list[Part] = field(default_factory=list)
    outputs: list[Part] = field(default_factory=list)
    description: str = ""
    search_aliases: list[str] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    is_input_list: bool = False
    is_output_node: bool = False


class NodeOutput:
    def __init__(self, *result: Any, ui: Any = None):
        self.result, self.ui = result, ui


class Progress:
    """ProgressBar; its calls are kept in ``updates``."""

    updates: list[tuple[int, int, Any]] = []

    def __init__(self, total: int):
        self.total = total

    def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
        Progress.updates.append((value, total or self.total, preview))


class Patcher:
    def __init__(self, model: Any, load_device: Any, offload_device: Any):
        self.model, self.load_device, self.offload_device = model, load_device, offload_device
        self.callbacks: list[Any] = []
        self.size = sum(weight.nbytes for weight in model.parameters())

    def model_size(self) -> int:
        return self.size

    def is_dynamic(self) -> bool:
        return state.dynamic

    def get_free_memory(self, device: Any) -> float:
        """Free bytes, and those that DynamicVRAM would give back."""
        return sys.modules["comfy.model_management"].get_free_memory(device) + state.given_back

    def add_callback(self, kind: str, callback: Any) -> None:
        assert kind == CallbacksMP.ON_DETACH
        self.callbacks.append(callback)

    def detach(self, unpatch_all: bool = True) -> Any:
        for callback in self.callbacks:
            callback(self, unpatch_all)
        return self.model


class Layers:
    """comfy.ops.disable_weight_init: layers of PyTorch with the attributes by which core knows them."""

    class Linear(nn.Linear):
        comfy_cast_weights = False
        weight_function: list[Any] = []

    class Embedding(nn.Embedding):
        comfy_cast_weights = False
        weight_function: list[Any] = []

    class Conv2d(nn.Conv2d):
        comfy_cast_weights = False
        weight_function: list[Any] = []


class VAE:
    """What the nodes use of core's; in ComfyUI, tests/comfyui/test_vae_nodes.py compares all names."""

    patcher: Any
    upscale_ratio: int

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio

    def is_dynamic(self) -> bool:
        return self.patcher.is_dynamic()

    def vae_output_dtype(self) -> torch.dtype:
        return state.intermediate_dtype


class CallbacksMP:
    ON_DETACH = "on_detach_after"


class ComfyNode:
    """The base class of V3 nodes; ComfyUI sets ``hidden`` on a copy of the class when it runs it."""

    hidden: Any = None


state = SimpleNamespace(
    interrupt_at=-1,
    asked=0,
    loaded=[],
    upscaled=[],
    said=[],
    sent=[],  # events
    folder=Path("none"),
    device="cpu",
    context=None,
    running=[],
    waiting=[],
    sockets={},
    places={},
    saved=[],
    prompt_handlers=[],
    dynamic=False,
    given_back=0,
    intermediate_dtype=torch.float32,
)


class Routes(list[Any]):
    """aiohttp's RouteTableDef; ``post`` adds what has a path."""

    def post(self, path: str) -> Any:
        return lambda handler: self.append(SimpleNamespace(path=path, handler=handler))


class _Queue:
    """PromptQueue; the runs in ``state.running`` are (number, id, prompt, extra data), those in ``state.waiting`` have
    the ids of the output nodes beside it.
    """

    @staticmethod
    def get_current_queue_volatile() -> tuple[list[Any], list[Any]]:
        return state.running, state.waiting


class _Saver:
    """ImageSaveHelper; what it is asked to save is kept in ``state.saved``."""

    @staticmethod
    def get_save_animated_webp_ui(images: Any, filename_prefix: str, cls: Any, **about: Any) -> None:
        state.saved.append((images, filename_prefix, about))


class Preview:
    """ui.PreviewImage; the images are kept in ``state.saved``."""

    def __init__(self, images: Any, cls: Any):
        state.saved.append(images)
        self.count = len(images)

    def as_dict(self) -> dict[str, Any]:
        return {"images": [{"filename": "a.png", "subfolder": "", "type": "temp"}] * self.count}


class Blocker:
    """ExecutionBlocker: the value of an output that was not made."""

    def __init__(self, message: str):
        self.message = message


def _said(text: str, node_id: str) -> None:
    state.said.append((node_id, text))


def _check() -> None:
    if state.asked == state.interrupt_at:
        raise Interrupted
    state.asked += 1


def _tiled_scale(samples: Any, function: Any, **about: Any) -> Any:
    """One tile."""
    return function(samples)


class Upscaled:
    """ImageUpscaleWithModel: copies of pixels; its inputs are kept in ``state.upscaled``."""

    @classmethod
    def execute(cls, upscale_model: Any, image: Any) -> Any:
        state.upscaled.append((upscale_model, image))
        return NodeOutput(image.repeat_interleave(upscale_model.scale, 1).repeat_interleave(upscale_model.scale, 2))


# ComfyUI's model folder: below a file, where nothing can be created, so that no test writes into the checkout.
MODELS = Path(__file__).resolve() / "models"
# Devices of ComfyUI by what they are for: the CPU, unless ``state.places`` names another one.
PLACES = ("get_torch", "unet_offload", "vae", "vae_offload", "text_encoder", "text_encoder_offload", "intermediate")


def _device(part: str) -> torch.device:
    return torch.device(state.places.get(part, "cpu"))


@cache
def install() -> None:
    """Register the fake modules; further calls change nothing."""
    types = ("Int", "Float", "Boolean", "String", "Combo", "Image", "Latent", "Mask", "Vae", "UpscaleModel")
    io = SimpleNamespace(
        **{kind: _type(kind.upper()) for kind in types},
        Custom=_type,
        Schema=Schema,
        NodeOutput=NodeOutput,
        ComfyNode=ComfyNode,
        UploadType=SimpleNamespace(image="image_upload"),
        FolderType=SimpleNamespace(input="input"),
        Hidden=Enum("Hidden", {name: name.upper() for name in ("unique_id", "extra_pnginfo", "prompt")}, type=str),
        Input=Part,
        Output=Part,
    )
    modules = {
        "comfy": {},
        "comfy_api": {},
        "comfy_api.v0_0_2": {
            "io": io,
            "ui": SimpleNamespace(ImageSaveHelper=_Saver, PreviewImage=Preview),
            "ComfyExtension": object,
        },
        "comfy.model_management": {
            **{f"{part}_device": partial(_device, part) for part in PLACES},
            "get_torch_device_name": lambda device: state.device,
            "get_free_memory": lambda device: 1e9,
            "get_total_memory": lambda device: 1e12,
            "current_loaded_models": [],
            "load_models_gpu": lambda models, **about: state.loaded.append((models, about)),
            "is_device_cpu": lambda device: device.type == "cpu",
            "soft_empty_cache": lambda: None,
            "dtype_size": lambda dtype: dtype.itemsize,
            "throw_exception_if_processing_interrupted": _check,
        },
        "comfy.ops": {"cast_bias_weight": None, "uncast_bias_weight": None, "disable_weight_init": Layers},
        "comfy.patcher_extension": {"CallbacksMP": CallbacksMP},
        "comfy.sd": {"VAE": VAE},
        "comfy.utils": {
            "ProgressBar": Progress,
            "tiled_scale": _tiled_scale,
            "get_tiled_scale_steps": lambda *a, **k: 1,
        },
        "comfy_extras": {},
        "comfy_execution": {},
        "comfy_execution.graph_utils": {"ExecutionBlocker": Blocker},
        "comfy_execution.utils": {"get_executing_context": lambda: state.context},
        "comfy_extras.nodes_upscale_model": {"ImageUpscaleWithModel": Upscaled},
        "comfy.cli_args": {
            "args": SimpleNamespace(preview_size=512, preview_method=SimpleNamespace(value="none")),
        },
        "comfy.model_patcher": {"ModelPatcher": Patcher, "CoreModelPatcher": Patcher},
        "server": {
            "PromptServer": SimpleNamespace(
                instance=SimpleNamespace(
                    send_progress_text=_said,
                    send_sync=lambda *message: state.sent.append(message),
                    client_id="editor",
                    prompt_queue=_Queue,
                    sockets_metadata=state.sockets,
                    routes=Routes(),
                    add_on_prompt_handler=state.prompt_handlers.append,
                )
            )
        },
        "folder_paths": {
            "models_dir": str(MODELS),
            "folder_names_and_paths": {"vae": ([str(MODELS / "vae")], set())},
            "__file__": str(Path("none") / "folder_paths.py"),
            "supported_pt_extensions": set(),
            "get_filename_list": lambda kind: [],
            "get_folder_paths": lambda kind: [str(MODELS / kind)],
            "add_model_folder_path": lambda *a, **k: None,
            "get_input_directory": lambda: str(state.folder / "input"),
            "get_output_directory": lambda: str(state.folder / "output"),
            "get_temp_directory": lambda: str(state.folder / "temp"),
            "get_annotated_filepath": lambda name: str(state.folder / "input" / name),
            "exists_annotated_filepath": lambda name: (state.folder / "input" / name).is_file(),
        },
    }
    for name, content in modules.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        for key, value in content.items():
            setattr(module, key, value)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
