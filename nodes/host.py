"""Interface to ComfyUI: folders, devices and memory, the prompt that runs, text on nodes, progress, upscale models.

The only module that imports ``comfy.*`` or ``folder_paths``. It handles networks and images of any family.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import comfy.utils
import folder_paths
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.sd import VAE as VAE  # for vae.py
from comfy.utils import ProgressBar
from comfy_execution.utils import get_executing_context
from server import PromptServer
from torch import Tensor, nn

from ..errors import OfFastAR, UserError, printable
from ..memory import enough_memory
from ..networks import graphs
from ..networks.eight_bits import FP8, INT8, Quantized, round_to, statement
from ..networks.ops import Operations
from ..networks.speed import AUTO, COMPILE, PLAIN
from ..reports.exchange import ENDINGS
from ..reports.files import expect_name, writable
from ..reports.record import dtype_of
from ..reports.table import literal

FOLDER = "fastar"
EXTENSIONS = {".safetensors", ".pth", ".pt", ".ckpt", ".bin"}


# ------------------------------------------------------------------------------------------------ model folders


def register_folders() -> None:
    """Register ``models/fastar`` with ComfyUI, and create it, so that a user finds where files belong."""
    folder = os.path.join(folder_paths.models_dir, FOLDER)
    folder_paths.add_model_folder_path(FOLDER, folder, is_default=True)

    with suppress(OSError):  # a folder that is read-only may still hold files
        os.makedirs(folder, exist_ok=True)

    _, extensions = folder_paths.folder_names_and_paths[FOLDER]
    if extensions is not folder_paths.supported_pt_extensions:  # shared with core's folders: must not change
        extensions.update(EXTENSIONS)


def local_files(*kinds: str) -> list[str]:
    """Names of the weight files in model folders, as in ComfyUI's menus."""
    names: list[str] = []
    for kind in kinds:
        names += folder_paths.get_filename_list(kind)
    return names


def folders(*kinds: str) -> list[Path]:
    """Directories of model folders."""
    paths: list[Path] = []
    for kind in kinds:
        paths += [Path(path) for path in folder_paths.get_folder_paths(kind)]
    return paths


# ------------------------------------------------------------ requests of the editor

# Seconds after which a request is answered without a result.
_LONGEST_ANSWER = 20


def serve(path: str, answer: Callable[[bytes], tuple[int, Any]], most: int) -> None:
    """Answer POST requests to a path of the server, in a thread, since the event loop serves everything else.

    Args:
        path: of the requests.
        answer: from the request's content to a status and what is sent as JSON.
        most: bytes of a request.

    Raises:
        UserError: another pack has the path; the server would not start with two.
    """
    routes = PromptServer.instance.routes
    if any(getattr(route, "path", None) == path for route in routes):
        raise UserError(f"another node pack has the address {path}")

    # One request at a time: a folder may be slow.
    worker = ThreadPoolExecutor(1, "fastar")

    async def handle(request: Any) -> Any:
        from aiohttp import web  # noqa: TID251  ComfyUI itself runs on it

        body = bytearray()
        async for part in request.content.iter_chunked(most):
            body += part
            if len(body) > most:
                return web.json_response({"error": f"the request has more than {most} bytes."}, status=400)

        work = asyncio.get_running_loop().run_in_executor(worker, answer, bytes(body))
        try:
            status, content = await asyncio.wait_for(work, _LONGEST_ANSWER)
        except asyncio.TimeoutError:
            status = 400
            content = {"error": f"the file was not read within {_LONGEST_ANSWER} seconds; try again."}
        return web.json_response(content, status=status)

    routes.post(path)(handle)


# The graph of the request that the server works on.
_sent: ContextVar[Any] = ContextVar("fastar_sent", default=None)


def watch_prompts(prepare: Callable[[Any], None]) -> None:
    """Let ``prepare`` change what a client sends to /prompt, and keep the graph in it for ``validate_inputs``, to which
    ComfyUI passes none.
    """

    def keep(request: Any) -> Any:
        _sent.set(request.get("prompt") if isinstance(request, Mapping) else None)
        prepare(request)
        return request

    PromptServer.instance.add_on_prompt_handler(keep)


def sent_graph() -> Any:
    """The graph that the server checks, as the client sent it; None outside of a check."""
    return _sent.get()


# ------------------------------------------------------------------------------------------------ images and results

SWEEPS = "fastar_sweeps"
_LONGEST_PATH = 4096
_NOT_ON_WINDOWS = frozenset('<>:"|?*')


def input_images() -> list[str]:
    """Names of the files in ComfyUI's input folder that may hold a report."""
    folder = Path(folder_paths.get_input_directory())
    if not folder.is_dir():
        return []

    return sorted(path.name for path in folder.iterdir() if path.suffix.lower() in ENDINGS)


def input_image(name: str) -> Path:
    """The file of an image in the input folder, or in the folder that the name ends with ("[output]", say)."""
    places = (
        folder_paths.get_input_directory(),
        folder_paths.get_output_directory(),
        folder_paths.get_temp_directory(),
    )

    try:
        path = Path(os.path.abspath(folder_paths.get_annotated_filepath(name[:_LONGEST_PATH])))
        # Not all supported versions of ComfyUI check that the name stays inside the folder.
        inside = any(path.is_relative_to(os.path.abspath(place)) for place in places)
        found = inside and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        found = False

    if not found:
        raise UserError(f"image: there is no image {name[:80]!r} in ComfyUI's folders; upload or choose one.")
    return path


def sweep_folder(name: str) -> Path:
    """The folder of a sweep's cells; it is not created."""
    return Path(folder_paths.get_output_directory()) / SWEEPS / name


def expect_writable(prefix: str, ending: str, field: str) -> None:
    """Check, before the work, that a file with this prefix can be saved in the output folder.

    Core reports it after the work. It replaces %year%, %width% and their like when it saves; the editor replaces
    %date:...% and %Node.widget% before it sends the prompt, and a program that sends them gets them in the name.

    Raises:
        UserError: a name that no file can have, one outside the folder, or a folder that is read-only or full.
    """
    folder = os.path.realpath(folder_paths.get_output_directory())
    expect_name(prefix, field)

    # A colon would give an empty file with a hidden stream that holds the content.
    if sys.platform == "win32" and not _NOT_ON_WINDOWS.isdisjoint(prefix):
        raise UserError(
            f"{field}: {prefix[:80]!a} has a character that no file can have on Windows; leave out "
            f"{' '.join(sorted(_NOT_ON_WINDOWS))}, and write %year%-%month%-%day% instead of %date:...%, which only "
            "the editor replaces."
        )

    path = Path(os.path.realpath(os.path.join(folder, os.path.normpath(prefix))))
    if not path.is_relative_to(folder) or path == Path(folder):
        raise UserError(
            f"{field}: {prefix[:80]!r} is not a name in the output folder; give one without '..' and without a drive "
            "or a leading slash."
        )

    writable(path.parent, field, f"{path.name}_00001_{ending}")


# ------------------------------------------------------------------------------------------------ devices


def get_compute_device() -> torch.device:
    """Device of image networks while they compute."""
    return mm.get_torch_device()


def get_offload_device() -> torch.device:
    """Device of image networks that are not in use."""
    return mm.unet_offload_device()


def get_text_device() -> torch.device:
    """Device of text encoders while they compute."""
    return mm.text_encoder_device()


def get_text_offload_device() -> torch.device:
    """Device of text encoders that are not in use."""
    return mm.text_encoder_offload_device()


def get_vae_device() -> torch.device:
    """Device of decoders while they compute."""
    return mm.vae_device()


def get_vae_offload_device() -> torch.device:
    """Device of decoders that are not in use."""
    return mm.vae_offload_device()


def get_output_device() -> torch.device:
    """Device of the tensors that nodes exchange."""
    return mm.intermediate_device()


def to_output(x: Tensor) -> Tensor:
    """A tensor as nodes exchange it: fp32 on the output device."""
    return x.to(get_output_device(), torch.float32)


def device_name() -> str:
    """The compute device with its model, "cuda:0 NVIDIA ..." for example."""
    return str(mm.get_torch_device_name(get_compute_device()))


def t5_tokenizer() -> Path | None:
    """Folder of the T5 tokenizer that ships with ComfyUI; it is the same for all T5 and Flan-T5 sizes."""
    folder = Path(folder_paths.__file__).parent / "comfy" / "text_encoders" / "t5_tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


# ------------------------------------------------------------------------------------------------ memory


def free_memory(patcher: ModelPatcher) -> float:
    """Free bytes of the device on which a network computes, with those that DynamicVRAM would give back for it."""
    return patcher.get_free_memory(patcher.load_device)


def empty_cache() -> None:
    """Give unused memory of the allocator back to the device."""
    mm.soft_empty_cache()


class _CoreOperations(Operations):
    """ComfyUI's operations: it casts and copies the weights of their layers, and decides which stay on the device.

    ComfyUI sets ``comfy_cast_weights`` on a layer whose weight it leaves on the offload device. DynamicVRAM sets it on
    every layer, and gives it a place on the device, ``_v``, in which a copy stays as long as there is room.
    """

    Linear = comfy.ops.disable_weight_init.Linear
    Embedding = comfy.ops.disable_weight_init.Embedding
    Conv2d = comfy.ops.disable_weight_init.Conv2d

    @contextmanager
    def weight(self, layer: Any, x: Tensor) -> Iterator[Tensor]:
        if not layer.comfy_cast_weights and not layer.weight_function:  # as ComfyUI's layers decide
            yield layer.weight
            return

        weight, bias, stream = comfy.ops.cast_bias_weight(layer, x, offloadable=True)
        try:
            yield weight
        except BaseException:
            with suppress(RuntimeError):  # comfy-aimdo's of the place on the device, which would hide the cause
                comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
            raise
        comfy.ops.uncast_bias_weight(layer, weight, bias, stream)

    def is_plain(self, layer: nn.Module) -> bool:
        return type(layer) is comfy.ops.disable_weight_init.Linear  # others may have quantised weights

    def offloaded(self, net: nn.Module) -> list[nn.Module]:
        found = []
        for layer in net.modules():
            if getattr(layer, "comfy_cast_weights", False) and not hasattr(layer, "_v"):
                found.append(layer)

        return found

    def moves(self, net: nn.Module) -> bool:
        for layer in net.modules():
            if getattr(layer, "comfy_cast_weights", False) or getattr(layer, "weight_function", None):
                return True

        return False

    def eight_bit(self, dtype: torch.dtype) -> Operations:
        return _EightBitOperations(dtype)


class _EightBitOperations(_CoreOperations):
    """ComfyUI's operations for networks with quantised weights, some of whose linear layers have 8 bits.

    ComfyUI multiplies int8 weights by an input that it rounds row by row, and fp8 weights by an input that is not
    rounded, unless the file has a measured scale for it and the device a product of fp8 matrices.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        disabled = _without_products(get_compute_device())
        self.Linear = comfy.ops.mixed_precision_ops({}, dtype, disabled=disabled).Linear

    def make_room(self, net: nn.Module, layers: Iterable[str]) -> None:
        pass  # these layers take weights of any form

    def entries(self, name: str, weight: Quantized) -> Mapping[str, Tensor]:
        if weight.kind == FP8 and weight.scale.ndim:  # for which ComfyUI has no layout
            weight = round_to(weight.numbers(), INT8)
        if weight.kind == INT8:
            _expect_int8(get_compute_device())

        found = {
            name: weight.stored,
            f"{name}_scale": weight.scale,
            f"{name.removesuffix('weight')}comfy_quant": statement(weight),
        }
        if weight.input_scale is not None and not weight.exact_input:
            found[f"{name.removesuffix('weight')}input_scale"] = weight.input_scale
        return found


# Devices without a product of int8 matrices: Apple's, Intel's and those of DirectML.
_WITHOUT_INT8 = ("mps", "xpu", "privateuseone")


def _without_products(device: torch.device) -> set[str]:
    """ComfyUI's names of the formats that a device cannot multiply, of which it converts a weight for every product."""
    if hasattr(comfy.ops, "get_disabled_quant_formats"):
        return set(comfy.ops.get_disabled_quant_formats(device))

    if mm.supports_fp8_compute(device):
        return set()
    return {"float8_e4m3fn", "float8_e5m2"}


def _expect_int8(device: torch.device) -> None:
    """Raise a UserError if this ComfyUI would multiply int8 matrices on a device that cannot.

    Newer versions say what a device cannot multiply, see :func:`_without_products`.
    """
    if device.type in _WITHOUT_INT8 and not hasattr(comfy.ops, "get_disabled_quant_formats"):
        raise UserError(
            f"dtype: this version of ComfyUI computes no int8 weights on {device}; update ComfyUI, or choose fp16, "
            "bf16 or fp32."
        )


_CORE_OPERATIONS = _CoreOperations()
graphs.allowed = not getattr(args, "disable_cuda_graphs", False)


def operations(device: torch.device) -> Operations | None:
    """The operations of networks that compute on a device: ComfyUI's.

    None on a CPU, where all weights stay in place: there the networks' own operations are faster.
    """
    return None if mm.is_device_cpu(device) else _CORE_OPERATIONS


def make_patcher(net: nn.Module, device: torch.device, offload: torch.device, speed: str = PLAIN) -> ModelPatcher:
    """What moves a network between the device on which it computes and ``offload``.

    It is that of ComfyUI's own models, which on graphics cards copies weights to the device when a layer first needs
    them (DynamicVRAM). Two kinds of networks take the one that loads weights before the run: those that are recorded or
    compiled, whose weights must be in place, and those without layers of ComfyUI's operations, which it would load one
    by one.
    """
    stays = speed == COMPILE or speed == AUTO and graphs.available(device)
    if stays or not _may_stream(net):
        return ModelPatcher(net, device, offload)

    return comfy.model_patcher.CoreModelPatcher(net, device, offload, **_storage())


def _storage() -> dict[str, bool]:
    """Where newer versions of ComfyUI keep the weights that DynamicVRAM leaves off the device, for its patcher.

    ``fast_disk``: nowhere but in the file, which its own loader reads again. Weights that this pack has mapped are
    copied to pinned memory like those of a slow disk, unless the user starts ComfyUI with --fast-disk.
    """
    try:
        import comfy.storage
    except ImportError:  # an older ComfyUI
        return {}

    return {"fast_disk": comfy.storage.model_fast_disk([])}


def load_weights(patchers: list[ModelPatcher], memory: float) -> None:
    """Load networks with ``memory`` bytes free to work in.

    Large layers may stay on the offload device where memory is insufficient, see :func:`operations`.
    """
    streaming = [patcher for patcher in patchers if _may_stream(patcher.model)]
    complete = [patcher for patcher in patchers if patcher not in streaming]

    for patcher in streaming:
        memory += sum(weight.nbytes for weight in always_loaded(patcher.model))

    ordered = [*streaming, *complete]  # ComfyUI loads the last one first
    with enough_memory("dtype: the weights do not fit into memory; choose int8, bf16 or fp16, or a smaller model."):
        mm.load_models_gpu(ordered, memory_required=memory, force_full_load=not streaming)

        for patcher in ordered:
            place(patcher.model, patcher.load_device)


def _can_stay(layer: nn.Module) -> bool:
    """Whether the weight of a layer may stay on the offload device: whether it is one of ComfyUI's operations."""
    return hasattr(layer, "comfy_cast_weights")


def _may_stream(net: nn.Module) -> bool:
    """Whether layers of a network may stay on the offload device."""
    return any(map(_can_stay, net.modules()))


def always_loaded(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers that cannot be left out."""
    found: list[Tensor] = []
    for module in net.modules():
        if not _can_stay(module):
            found += module.parameters(recurse=False)
            found += module.buffers(recurse=False)

    return found


def place(net: nn.Module, device: torch.device) -> None:
    """Move to the device what cannot be left out.

    ComfyUI's partial loading skips parameters of modules that have children.
    """

    def moved(tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == device.type else tensor.to(device)

    for module in net.modules():
        if not _can_stay(module):
            module._apply(moved, recurse=False)


def in_tiles(
    x: Tensor,
    work: Callable[[Tensor], Tensor],
    *,
    tile: tuple[int, int],
    overlap: int,
    scale: float,
    channels: int,
    device: torch.device,
) -> Tensor:
    """``work`` in blended tiles, by core.

    Args:
        x: [B, C, H, W].
        work: from a tile [1, C, h, w] to [1, channels, h * scale, w * scale].
        tile: height and width of a tile of ``x``.
        overlap: of tiles, in positions of ``x``.
        device: of the result.
    """
    height, width = tile
    tiles = comfy.utils.get_tiled_scale_steps(x.shape[3], x.shape[2], tile_x=width, tile_y=height, overlap=overlap)
    bar = ProgressBar(len(x) * tiles)

    with enough_memory("memory: it is insufficient for one tile; use smaller tiles, or unload other models."):
        return comfy.utils.tiled_scale(
            x,
            work,
            tile_x=width,
            tile_y=height,
            overlap=overlap,
            upscale_amount=scale,
            out_channels=channels,
            output_device=device,
            pbar=bar,
        )


# ------------------------------------------------------------------------------------------------ models on sockets


# Images of a batch that a preview shows.
MOST_IMAGES = 4
# In ``Loaded.parts`` of a de-tokenizer: the TA-Tok that reads semantic codes.
TA_TOK = "ta_tok"


class Model(Protocol):
    """A network with what is known about it; see ``networks``."""

    @property
    def net(self) -> nn.Module: ...


M = TypeVar("M", bound=Model)


@dataclass(eq=False)
class Loaded(OfFastAR, Generic[M]):
    """Value of a model socket. It owns the patchers, because ComfyUI's list of loaded models holds no reference."""

    kind: ClassVar[str] = "model"
    fastar_version: ClassVar[int] = 1  # of its description in docs/sockets.md
    model: M
    # Moves the weights of ``net``, or of the first of the parts of a MAR or BitDance.
    patcher: ModelPatcher
    # The FastARVAE of the same loader, for live previews; None without one. Not typed, because vae.py imports this
    # module.
    vae: Any = None
    # Further networks of the same loader by name. Each has its own patcher and is on the device only while needed.
    parts: Mapping[str, Loaded[Any]] = field(default_factory=dict)
    # Settings of the model's file, for presets.
    recommended: Mapping[str, Any] = field(default_factory=dict)
    # Of the model's other parts.
    further: Sequence[ModelPatcher] = ()
    # How the model runs, a choice of the loader.
    speed: str = ""

    def __str__(self) -> str:
        """For people: what core's Preview as Text shows."""
        nets = getattr(self.model, "parts", {"": self.model.net}).values()
        count = sum(weight.numel() for net in nets for weight in net.parameters())
        name = printable(getattr(self.model, "name", ""))
        return f"The model {name}, with {count:,} parameters in {dtype_of(self.model.net)}."

    @staticmethod
    def of(
        model: M,
        vae: Any = None,
        parts: Mapping[str, Loaded[Any]] | None = None,
        recommended: Mapping[str, Any] | None = None,
        speed: str = "",
    ) -> Loaded[M]:
        """Place a model under ComfyUI's memory management: its parts one by one."""
        compute = get_compute_device()
        offload = get_offload_device()

        nets = list(getattr(model, "parts", {"": model.net}).values())
        patchers: list[ModelPatcher] = []
        for net in nets:
            patchers.append(make_patcher(net, compute, offload, speed or PLAIN))

        return Loaded(
            model,
            patchers[0],
            vae,
            parts=parts or {},
            recommended=recommended or {},
            further=patchers[1:],
            speed=speed,
        )

    @property
    def patchers(self) -> list[ModelPatcher]:
        """Of all parts of the model; not of the decoder, and not of ``parts``."""
        return [self.patcher, *self.further]

    # Names that core reads.

    def get_models(self) -> list[ModelPatcher]:
        """All patchers but the decoder's, which is on a socket of its own.

        Core marks them as in use by the prompt that runs, and takes pinned memory from others first.
        """
        found = list(self.patchers)
        for part in self.parts.values():
            found += part.patchers
        return found

    def is_dynamic(self) -> bool:
        """Whether DynamicVRAM manages its first part, the transformer: core then keeps the cached result.

        A diffusion head beside it has few weights, which are loaded before the run.
        """
        return self.patcher.is_dynamic()


def to_device(
    loaded: Loaded[Any], memory: float, latents: tuple[int, int, int, int], others: Sequence[ModelPatcher] = ()
) -> Any:
    """Load a model and other networks with ``memory`` bytes free to work in.

    The decoder is loaded too, if there are previews of ``latents`` [B, C, h, w]: if they are wanted, and the device can
    hold the decoder beside the rest. Otherwise weights would have to stay in main memory for the sake of previews.

    Returns:
        The FastARVAE of the previews; None without previews.
    """
    patchers = list(dict.fromkeys([*loaded.patchers, *others]))

    vae = loaded.vae
    if vae is not None and previews_wanted():
        shown = min(MOST_IMAGES, latents[0])
        decoding = shown * vae.memory_used_decode(latents, vae.vae_dtype)

        together = list(dict.fromkeys([*patchers, vae.patcher]))
        weights = sum(patcher.model_size() for patcher in together)
        if weights + memory + decoding <= mm.get_total_memory(loaded.patcher.load_device):
            load_weights(together, memory + decoding)
            return vae

    load_weights(patchers, memory)
    return None


def load_to_device(loaded: Loaded[Any], memory: float) -> None:
    """Load a model without previews (a text encoder, say) to its device, with ``memory`` bytes free to work in."""
    load_weights([loaded.patcher], memory)


class ModelCache:
    """Holds one model that is expensive to load, until another one is stored or ComfyUI unloads its weights.

    The arguments return the compute device and the device of networks that are not in use.
    """

    def __init__(self, get_compute: Callable[[], torch.device], get_offload: Callable[[], torch.device]) -> None:
        self._get_compute = get_compute
        self._get_offload = get_offload
        self._key: Hashable = None
        self._loaded: Loaded[Any] | None = None

    def get(self, key: Hashable, load: Callable[[], Model]) -> Loaded[Any]:
        """The model stored under ``key``; if there is none, the result of ``load`` is stored."""
        if self._loaded is not None and self._key == key:
            return self._loaded

        self._loaded = None  # frees memory before the next model is loaded
        model = load()

        patcher = make_patcher(model.net, self._get_compute(), self._get_offload())
        patcher.add_callback(CallbacksMP.ON_DETACH, self._drop)
        self._loaded = Loaded(model, patcher)
        self._key = key
        return self._loaded

    def _drop(self, patcher: ModelPatcher, unpatch_all: bool) -> None:
        if self._loaded is None or self._loaded.patcher is not patcher:
            return

        # Core reads the patcher again after this call, in a loop over its records. If it were freed here, core would
        # take its record out of the list within that loop. So the record holds it, until core has let go of that.
        for record in mm.current_loaded_models:
            if record.model is patcher:
                record.fastar_unloaded = self._loaded
        self._loaded = None


# ------------------------------------------------------------------------------------------------ the prompt that runs


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

    The command line's default is none. It counts as on in the editor, whose setting can switch previews off.
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


# ------------------------------------------------------------------------------------------------ text and progress

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
    """Show a line of text on a node, the class that executes, while it runs, as core's API nodes do.

    The editor removes it at the end of the run; :func:`text_output` is for what stays. For a client that is not the
    editor the line is written to the log.
    """
    number = hidden(node, "unique_id")
    if number is None:
        return

    if from_editor():
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
    if context is not None and from_editor():
        server = PromptServer.instance
        server.send_sync(REMARK, {"node": context.node_id, "text": text}, server.client_id)


def text_output(
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

    Empty lines are left out; the others are cut to 8 lines of 400 characters.
    """
    warned = _lines(warnings)[:MOST_LINES]
    counted = _lines(figures)[: MOST_LINES - len(warned)]
    shown = [*warned, *counted, *_lines([settings])][:MOST_LINES]

    others = [[number, printable(text, LONGEST_LINE)] for number, text in (prompts or {}).items()]

    said = [*(text for _, text in others), *shown]
    if said and not from_editor():
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


def stop_if_cancelled() -> None:
    """Raise ComfyUI's exception if the run was cancelled."""
    mm.throw_exception_if_processing_interrupted()


def progress() -> Callable[[int, int], None]:
    """A callback (done, total) for downloads and other long work; it raises when the run is cancelled."""
    bar = ProgressBar(1)

    def report(done: int, total: int) -> None:
        stop_if_cancelled()

        if total > 0:
            bar.update_absolute(min(done, total), total)

    return report


# ------------------------------------------------------------------------------------------------ upscale models


def upscaler(model: Any, place: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    """An UPSCALE_MODEL as a function of images fp32 [B, 3, H, W] in 0..1, by core's node.

    Core's node may unload the sampled models to make room for its own; ``place`` loads them again.
    """
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel

    def enlarge(images: Tensor) -> Tensor:
        (done,) = ImageUpscaleWithModel.execute(model, images.movedim(1, -1)).result
        place()
        return done.movedim(-1, 1).to(images.device, torch.float32)

    return enlarge
