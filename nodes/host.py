"""Interface to ComfyUI: folders, devices and memory, progress, interrupt, live preview, upscale models, VAE.

The only module that imports ``comfy.*`` or ``folder_paths``. It handles networks, pictures and latents of any family.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import comfy.model_management as mm
import comfy.ops
import comfy.utils
import folder_paths
import numpy as np
import torch
import torch.nn.functional as F
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer
from torch import Tensor, nn

from ..errors import UserError
from ..memory import enough_memory, in_chunks, out_of_memory
from ..model_loaders.networks.autoencoder import expect_finite
from ..model_loaders.networks.ops import streamed_layers
from ..reports.drawing import contact_sheet
from ..reports.files import expect_name, writable
from ..reports.table import literal
from .schema import expect_image, expect_latents, expect_usual_size

FOLDER = "fastar"
EXTENSIONS = {".safetensors", ".pth", ".pt", ".ckpt", ".bin"}
# Of live previews: colour of undecided tokens; least side, to which smaller pictures are enlarged by an integer factor; images of a
# batch; seconds between two.
GREY, LEAST, MOST_IMAGES, INTERVAL = 128, 256, 4, 0.5


# ------------------------------------------------------------------------------------------------ model folders


def register_folders() -> None:
    """Register ``models/fastar`` with ComfyUI, and create it, so that a user finds where files belong."""
    folder = os.path.join(folder_paths.models_dir, FOLDER)
    folder_paths.add_model_folder_path(FOLDER, folder, is_default=True)
    with suppress(OSError):  # a folder that is read-only may still hold files
        os.makedirs(folder, exist_ok=True)
    extensions = folder_paths.folder_names_and_paths[FOLDER][1]
    if extensions is not folder_paths.supported_pt_extensions:  # shared with core's folders: must not change
        extensions.update(EXTENSIONS)


def local_files(*kinds: str) -> list[str]:
    """Names of the weight files in model folders, as in ComfyUI's menus."""
    return [name for kind in kinds for name in folder_paths.get_filename_list(kind)]


def folders(*kinds: str) -> list[Path]:
    """Directories of model folders."""
    return [Path(path) for kind in kinds for path in folder_paths.get_folder_paths(kind)]


# ------------------------------------------------------------------------------------------------ pictures

SWEEPS, _LONGEST_PATH = "fastar_sweeps", 4096
MOST_LINES, LONGEST_LINE = 8, 400  # on a node, and characters of each


def input_pictures() -> list[str]:
    """Names of the PNG files in ComfyUI's input folder."""
    folder = Path(folder_paths.get_input_directory())
    return sorted(p.name for p in folder.iterdir() if p.suffix.lower() == ".png") if folder.is_dir() else []


def input_picture(name: str) -> Path:
    """The file of a picture in the input folder, or in the folder that the name ends with ("[output]", say)."""
    places = (getattr(folder_paths, f"get_{kind}_directory")() for kind in ("input", "output", "temp"))
    try:
        name = name[:_LONGEST_PATH]
        path = Path(os.path.abspath(folder_paths.get_annotated_filepath(name)))
        # Not all supported versions of ComfyUI check that the name stays inside the folder.
        inside = any(path.is_relative_to(os.path.abspath(place)) for place in places) and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        inside = False
    if not inside:
        raise UserError(f"image: there is no picture {name[:80]!r} in ComfyUI's folders; upload or choose one.")
    return path


def sweep_folder(name: str) -> Path:
    """The folder of a sweep's cells; it is not created."""
    return Path(folder_paths.get_output_directory()) / SWEEPS / name


def expect_writable(prefix: str, ending: str, field: str) -> None:
    """Check, before the work, that a file with this prefix can be saved in the output folder; core reports it after the work.

    Raises:
        UserError: a name that no file can have, one outside the folder, or a folder that is read-only or full.
    """
    folder = os.path.realpath(folder_paths.get_output_directory())
    expect_name(prefix, field)
    path = Path(os.path.realpath(os.path.join(folder, os.path.normpath(prefix))))
    if not path.is_relative_to(folder) or path == Path(folder):
        raise UserError(
            f"{field}: {prefix[:80]!r} is no name in the output folder; give one without .. and without a root."
        )
    writable(path.parent, field, f"{path.name}_00001_{ending}")


# ------------------------------------------------------------------------------------------------ memory


# Functions that return the compute device and the device of networks not in use; of image networks, and of text encoders.
device, offload_device = mm.get_torch_device, mm.unet_offload_device
text_device, text_offload_device = mm.text_encoder_device, mm.text_encoder_offload_device


def t5_tokenizer() -> Path | None:
    """Folder of the T5 tokenizer that ships with ComfyUI; it is the same for all T5 and Flan-T5 sizes."""
    folder = Path(folder_paths.__file__).parent / "comfy" / "text_encoders" / "t5_tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def to_output(x: Tensor) -> Tensor:
    """A tensor as nodes exchange it: fp32 on the intermediate device."""
    return x.to(mm.intermediate_device(), torch.float32)


@dataclass(eq=False)
class Loaded:
    """Value of a model socket. It owns the patchers, because ComfyUI's list of loaded models holds no reference."""

    model: Any
    patcher: ModelPatcher  # moves the weights of ``net``, or of the first of the model's ``parts``
    vae: FastARVAE | None = None  # decoder of the same loader, for live previews
    # Further networks of the same loader by name. Each has its own patcher and is on the device only while needed.
    parts: Mapping[str, Loaded] = field(default_factory=dict)
    recommended: Mapping[str, Any] = field(default_factory=dict)  # settings of the model's file, for presets
    further: Sequence[ModelPatcher] = ()  # of the model's other ``parts``
    speed: str = ""  # how the model runs, a choice of the loader

    @staticmethod
    def of(
        model: Any, vae: FastARVAE | None = None, parts: Any = None, recommended: Any = None, speed: str = ""
    ) -> Loaded:
        """Place a model under ComfyUI's memory management: its ``parts`` one by one if it names any, else ``net``."""
        nets = getattr(model, "parts", {"": model.net})
        managed = [allow_streaming(net, device()) for net in nets.values()]
        patcher, *further = (_NotifyingPatcher(net, device(), offload_device()) for net in managed)
        return Loaded(model, patcher, vae, parts or {}, recommended or {}, further, speed)


def to_device(loaded: Loaded, memory: float, latents: tuple[int, int, int, int], others: Sequence[Any] = ()) -> None:
    """Load a model, other models and decoders, and the decoder for previews of ``latents`` [B, C, h, w], with ``memory`` bytes free."""
    patchers = [p for one in (loaded, *others) for p in (one.patcher, *getattr(one, "further", ()))]
    if loaded.vae is not None and previews_wanted():
        patchers.append(loaded.vae.patcher)
        memory += min(MOST_IMAGES, latents[0]) * loaded.vae.memory_used_decode(latents, loaded.vae.vae_dtype)
    _load(list(dict.fromkeys(patchers)), memory)


class ModelCache:
    """Holds one model that is expensive to load, until another one is stored or ComfyUI unloads its weights.

    ``devices`` return the compute and the offload device.
    """

    def __init__(self, *devices: Callable[[], torch.device]) -> None:
        self._devices = devices
        self._key: Any = None
        self._loaded: Loaded | None = None

    def get(self, key: Any, load: Callable[[], Any]) -> Loaded:
        """The model stored under ``key``; if there is none, the result of ``load`` (an object with ``net``) is stored."""
        if self._loaded is None or self._key != key:
            self._loaded = None  # frees memory before the next model is loaded
            model = load()
            patcher = _NotifyingPatcher(model.net, *(device() for device in self._devices))
            patcher.on_detach = self._drop
            self._loaded, self._key = Loaded(model, patcher), key
        return self._loaded

    def _drop(self, patcher: ModelPatcher) -> None:
        if self._loaded is not None and self._loaded.patcher is patcher:
            self._loaded = None


class _NotifyingPatcher(ModelPatcher):
    """A patcher that calls ``on_detach`` when weights are unloaded."""

    on_detach: Callable[[ModelPatcher], None] | None = None

    def detach(self, unpatch_all: bool = True) -> Any:
        out = super().detach(unpatch_all)
        if self.on_detach is not None:
            self.on_detach(self)
        return out


def device_name() -> str:
    """The compute device with its model, "cuda:0 NVIDIA ..." for example."""
    return str(mm.get_torch_device_name(device()))


def load_to_device(loaded: Loaded, memory: float) -> None:
    """Load a model without previews (a text encoder, a language model) to its device, with ``memory`` bytes free to work in."""
    _load([loaded.patcher], memory)


def _load(patchers: list[ModelPatcher], memory: float) -> None:
    """Load networks; large layers of a network may stay on the offload device where memory is insufficient, see :class:`_Streamed`."""
    streaming = [p for p in patchers if any(layer.source is not None for layer in streamed_layers(p.model))]
    memory += sum(t.nbytes for p in streaming for t in always_loaded(p.model))
    patchers = [*streaming, *(p for p in patchers if p not in streaming)]  # ComfyUI loads the last one first
    with enough_memory("dtype: the weights do not fit into memory; choose bf16 or fp16, or a smaller model."):
        mm.load_models_gpu(patchers, memory_required=memory, force_full_load=not streaming)
        # A dynamic patcher (an upscale model's may be) places its weights itself.
        for patcher in (p for p in patchers if not getattr(p, "is_dynamic", bool)()):
            place(patcher.model, patcher.load_device)


class _Streamed:
    """The source of weights that stay on the offload device and are copied for every call; see ``networks/ops.py``.

    ComfyUI recognises layers that can do without their weight by attributes (``comfy_cast_weights`` and the functions of patches),
    and sets ``comfy_cast_weights`` on those that it leaves out.
    """

    def is_offloaded(self, layer: Any) -> bool:
        return bool(layer.comfy_cast_weights)

    @contextmanager
    def stream_weight(
        self, layer: Any, x: Tensor, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        if rows is not None:  # ComfyUI would copy all rows, of an embedding ten times as many
            yield layer.weight[slice(*rows)].to(x.device, x.dtype), None
            return
        weight, bias, stream = comfy.ops.cast_bias_weight(layer, x, offloadable=True)
        try:
            yield weight, bias
        finally:
            comfy.ops.uncast_bias_weight(layer, weight, bias, stream)

    def look_up(self, layer: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids.to(layer.weight.device), layer.weight).to(ids.device)


def allow_streaming(net: nn.Module, device: torch.device) -> nn.Module:
    """Allow ComfyUI to load a network partially, unless it computes on a CPU; returns ``net``."""
    if device.type != "cpu":
        for layer in streamed_layers(net):
            about = {"source": _Streamed(), "comfy_cast_weights": False, "weight_function": [], "bias_function": []}
            vars(layer).update(about)
    return net


def always_loaded(net: nn.Module) -> list[Tensor]:
    """Parameters and buffers that cannot be left out."""
    left = {id(t) for layer in streamed_layers(net) if layer.source is not None for t in layer.tensors()}
    return [t for t in (*net.parameters(), *net.buffers()) if id(t) not in left]


def place(net: nn.Module, device: torch.device) -> None:
    """Move to the device what cannot be left out. ComfyUI's partial loading skips parameters of modules that have children."""
    for module in net.modules():
        if getattr(module, "source", None) is None:
            module._apply(lambda t: t if t.device.type == device.type else t.to(device), recurse=False)


# ------------------------------------------------------------------------------------------------ driving a sampler


# Of the editor's setting *Live preview method* and of ComfyUI's option --preview-method.
_NO_PREVIEWS, _AS_SERVER = "none", "default"


def _extra_data() -> Mapping[str, Any] | None:
    """What the client sent beside the prompt that runs; None outside of a run."""
    running, _ = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    for _, number, _, extra, *_ in running:
        if number == prompt_id():
            return extra if isinstance(extra, Mapping) else {}
    return None


def from_editor() -> bool:
    """Whether the prompt that runs was queued in the editor, which shows previews and texts on nodes; True outside of a run.

    Other clients take every binary message for an image of the result. The editor sends its graph, to be saved with the images, and its
    connection said that it understands messages about nodes.
    """
    extra = _extra_data()
    if extra is None:
        return True
    saved = extra.get("extra_pnginfo")
    if not isinstance(saved, Mapping) or saved.get("workflow") is None:
        return False
    connections = getattr(PromptServer.instance, "sockets_metadata", None)
    if connections is None:  # a ComfyUI that does not ask its clients
        return True
    connection = connections.get(str(extra.get("client_id")), {})
    return bool(connection.get("feature_flags", {}).get("supports_preview_metadata"))


def previews_wanted() -> bool:
    """Whether previews are sent: if a method is chosen, in the editor or on the command line, or the prompt comes from the editor.

    The command line's default is none. It counts as on in the editor, whose setting can switch previews off.
    """
    extra = _extra_data()
    if extra is None:
        return True
    asked = extra.get("preview_method") or _AS_SERVER
    if asked == _AS_SERVER:
        by_server = str(getattr(getattr(args, "preview_method", None), "value", _NO_PREVIEWS))
        return by_server != _NO_PREVIEWS or from_editor()
    return asked != _NO_PREVIEWS


class Canvas:
    """Draws previews of a sampler's steps at a bounded cost.

    The interval between previews is at least half a second and at least ten times the duration of the last one.
    """

    def __init__(self, decode: Callable[[Tensor], Tensor]):
        self.decode = decode
        self._next = time.perf_counter() + INTERVAL

    def due(self) -> bool:
        """Whether the next preview is due."""
        return time.perf_counter() >= self._next

    def draw(self, latents: Tensor, decided: Tensor) -> np.ndarray:
        """Decoder latents [B, C, h, w] as a picture uint8 [H, W, 3]; of a batch the first four images, two by two.

        Tokens that are not ``decided``, bool [B, gh, gw], are grey.
        """
        known = decided[:MOST_IMAGES].cpu().numpy()  # synchronises, so that only the decoder is timed
        began = time.perf_counter()
        pictures = to_bytes(self.decode(latents[:MOST_IMAGES]))
        self._next = time.perf_counter() + max(INTERVAL, 10 * (time.perf_counter() - began))
        _, height, width, _ = pictures.shape
        rows, columns = np.arange(height) * known.shape[1] // height, np.arange(width) * known.shape[2] // width
        pictures = np.where(known[:, rows][:, :, columns, None], pictures, np.uint8(GREY))
        sheet = contact_sheet(pictures, gap=0)
        factor = max(1, LEAST // max(sheet.shape[:2]))
        return sheet.repeat(factor, axis=0).repeat(factor, axis=1)


def to_bytes(pictures: Tensor) -> np.ndarray:
    """Finite pictures [B, H, W, C] in 0..1 to uint8 [B, H, W, 3], rounded; grey is repeated, alpha dropped."""
    x = colours(pictures.detach().float().clamp(0, 1))
    return (x * 255).round().to(torch.uint8).cpu().numpy()


def colours(pictures: Tensor) -> Tensor:
    """Pictures [B, H, W, C] of 1, 3 or 4 channels to [B, H, W, 3]: grey is repeated, alpha dropped."""
    return pictures.expand(*pictures.shape[:3], 3) if pictures.shape[3] == 1 else pictures[..., :3]


def drive(sampler: Any, vae: FastARVAE | None = None, latents: Callable[[Any], Tensor] = attrgetter("latents")) -> Any:
    """Run a sampler generator to its end, with progress bar, cancellation and live preview; returns its result.

    Args:
        sampler: yields objects with ``done``, ``total`` and ``decided`` bool [B, gh, gw].
        vae: decoder, on the device; None for no preview.
        latents: from a yielded object to latents [B, C, h, w]; called only for a preview.
    """
    canvas = Canvas(vae.decode_now) if vae is not None and previews_wanted() else None
    bar = comfy.utils.ProgressBar(1)
    try:
        while True:
            # ProgressBar checks too, but it is throttled, which would delay a cancellation by several steps.
            mm.throw_exception_if_processing_interrupted()
            try:
                step = next(sampler)
            except StopIteration as end:
                return end.value
            wanted = canvas is not None and (canvas.due() or step.done == step.total)
            picture = _preview(canvas, step, latents) if wanted else None
            bar.update_absolute(step.done, step.total, picture)
    finally:
        sampler.close()


def _preview(canvas: Canvas | None, step: Any, latents: Callable[[Any], Tensor]) -> tuple[str, Image.Image, int] | None:
    """The preview argument of ProgressBar; None without a canvas or if memory is insufficient."""
    if canvas is None:
        return None
    try:
        return "JPEG", Image.fromarray(canvas.draw(latents(step), step.decided)), args.preview_size
    except RuntimeError as problem:
        if not out_of_memory(problem):
            raise
        return None


def show(node: Any, lines: Sequence[str]) -> None:
    """Show lines of text on a node, the class that executes, as core's API nodes do; empty ones are left out.

    At most 8 lines of 400 characters, shown as they are, see :func:`.reports.table.literal`. For a client that is not the editor they are
    written to the log.
    """
    told = [literal(line, LONGEST_LINE) for text in lines for line in text[: MOST_LINES * LONGEST_LINE].splitlines()]
    text, number = "\n".join([line for line in told if line][:MOST_LINES]), hidden(node, "unique_id")
    if not text or number is None:
        return
    if from_editor():
        PromptServer.instance.send_progress_text(text, number)
        return
    logging.info("FastAR: %s", text.replace("\n", " "))


def hidden(node: Any, name: str) -> Any:
    """A hidden input of a node; None outside of ComfyUI's execution."""
    return getattr(getattr(node, "hidden", None), name, None)


def prompt_id() -> str:
    """Id of the run of the graph; "" outside of one."""
    return str(getattr(get_executing_context(), "prompt_id", ""))


_queued: dict[str, Any] = {}


def keep_queued() -> None:
    """Keep the graph that is being queued, for :func:`graph_of`."""

    def keep(request: Any) -> Any:
        _queued["graph"] = request.get("prompt")
        return request

    PromptServer.instance.add_on_prompt_handler(keep)


def graph_of(node: Any) -> dict[str, Any]:
    """Node id to node, of the graph that the node is in: the one that runs, or that is being validated, which ComfyUI does not pass."""
    return hidden(node, "prompt") or _queued.get("graph") or {}


class _Searched:
    """What is known about the last graph that was searched; it is searched once, not once for each of its nodes."""

    graph: Any = None
    users: dict[tuple[str, str], list[dict[str, Any]]] = {}
    checks = 0


def _search(graph: Any) -> None:
    if _Searched.graph is graph:
        return
    _Searched.graph, _Searched.users, _Searched.checks = graph, {}, 0
    for node in graph.values() if isinstance(graph, Mapping) else ():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        for name, link in inputs.items() if isinstance(inputs, Mapping) else ():
            if isinstance(link, list) and len(link) == 2 and link[1] == 0:
                _Searched.users.setdefault((str(link[0]), name), []).append(dict(inputs))


def users(node: Any, name: str) -> list[dict[str, Any]]:
    """Inputs of the nodes of the graph whose input ``name`` is connected to the first output of the node."""
    _search(graph_of(node))
    return _Searched.users.get((str(hidden(node, "unique_id")), name), [])


def checks(node: Any) -> int:
    """How often this was called for the graph of the node, from 1."""
    _search(graph_of(node))
    _Searched.checks += 1
    return _Searched.checks


def typed(node: Any, name: str) -> Any:
    """What the graph holds for an input of the node: a value, or a link as a list; None if it holds nothing."""
    return graph_of(node).get(str(hidden(node, "unique_id")), {}).get("inputs", {}).get(name)


def maker(node: Any, name: str) -> str:
    """Type of the node that is connected to an input; "" if there is none."""
    link = typed(node, name)
    return str(graph_of(node).get(link[0], {}).get("class_type")) if isinstance(link, list) else ""


def taken(node: Any, output: int) -> bool:
    """Whether an output of the node is connected in the prompt that runs."""
    prompt, number = hidden(node, "prompt"), str(hidden(node, "unique_id"))
    nodes = prompt.values() if isinstance(prompt, dict) else ()
    return any([number, output] == value for other in nodes for value in other.get("inputs", {}).values())


def progress() -> Callable[[int, int], None]:
    """A callback (done, total) for downloads and other long work; it raises when the run is cancelled."""
    bar = comfy.utils.ProgressBar(1)

    def report(done: int, total: int) -> None:
        mm.throw_exception_if_processing_interrupted()
        if total > 0:
            bar.update_absolute(min(done, total), total)

    return report


# ------------------------------------------------------------------------------------------------ upscale models


def upscaler(model: Any, place: Callable[[], None]) -> Callable[[Tensor], Tensor]:
    """An UPSCALE_MODEL as a function of pictures fp32 [B, 3, H, W] in 0..1, by core's node; ``place`` loads the sampled models again."""
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel

    def enlarge(pictures: Tensor) -> Tensor:
        (done,) = ImageUpscaleWithModel.execute(model, pictures.movedim(1, -1)).result
        place()
        return done.movedim(-1, 1).to(pictures.device, torch.float32)

    return enlarge


# ------------------------------------------------------------------------------------------------ VAE

# Kind of autoencoder to the models whose latents it decodes.
KL, VQ = "kl", "vq"
_MODELS = {KL: "a MAR", VQ: "a LlamaGen, a PAR or a Tar de-tokenizer"}


def mark(samples: Tensor, kind: str) -> Tensor:
    """Note on a tensor which autoencoder decodes it. Operations on the tensor lose the note, and then nothing is checked."""
    samples.fastar_latents = kind  # type: ignore[attr-defined]
    return samples


def kind_of(samples: Any) -> str:
    """The kind of autoencoder that :func:`mark` noted, "" if it is unknown."""
    return str(getattr(samples, "fastar_latents", ""))


def _checked_latents(samples: Any, channels: int, name: str, kind: str = "") -> Tensor:
    """Latents [B, C, h, w] for a decoder of that name and kind, checked as by :func:`expect_latents`."""
    made = kind_of(samples)
    if kind and made not in ("", kind):
        raise UserError(
            f"samples: these latents are of {_MODELS[made]}, the decoder {name} is for those of {_MODELS[kind]}; connect the VAE of the "
            "loader that made them."
        )
    latents = expect_latents(samples, "samples")
    if latents.shape[1] != channels:
        raise UserError(
            f"samples: they have {latents.shape[1]} channels, and the decoder {name} reads latents [B, {channels}, h, w]; connect the VAE "
            "of the loader that made them."
        )
    return latents


def _checked_pixels(pictures: Any) -> Tensor:
    """Pictures [B, H, W, C] of VAE Encode, checked, to [B, 3, H, W]."""
    return colours(expect_image(pictures, "pixels")).movedim(-1, 1)


def scaled(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures [B, C, H, W] in 0..1 of another size, bicubic."""
    if x.shape[2:] == size:
        return x
    return F.interpolate(x.float(), size, mode="bicubic", antialias=True).clamp(0, 1)


class FastARVAE:
    """A decoder with the interface of core's VAE: decode, encode, their tiled forms, and memory estimates.

    Latents are in the network's scale; samplers have divided by their latent scale. Encoding is deterministic: it returns the mean of
    the posterior, or the vectors of the nearest codes.

    ``net`` decodes to pictures in about -1..1 and encodes them to (latents, ...). ``stride``: pixels per latent position and side;
    ``width``: channels of the widest full-resolution layer, for the memory estimate; ``side``: of the model's pictures, in pixels, to
    which pictures are scaled before they are encoded; ``kind``: see :func:`_checked_latents`.
    """

    def __init__(self, net: nn.Module, name: str, stride: int, channels: int, width: int, side: int, kind: str = ""):
        self.first_stage_model, self.name, self.width, self.side, self.kind = net, name, width, side, kind
        self.downscale_ratio = self.upscale_ratio = stride
        self.latent_channels, self.latent_dim, self.output_channels = channels, 2, 3
        self.device, self.output_device = mm.vae_device(), mm.intermediate_device()
        self.vae_dtype = next(net.parameters()).dtype
        self.patcher = ModelPatcher(net, self.device, mm.vae_offload_device())

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio

    def spacial_compression_encode(self) -> int:
        return self.downscale_ratio

    def temporal_compression_decode(self) -> None:
        return None

    def throw_exception_if_invalid(self) -> None:
        """Called by core; a decoder that was loaded is valid."""

    def get_sd(self) -> dict[str, Tensor]:
        """Weights, for core's Save VAE."""
        return self.first_stage_model.state_dict()

    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> float:  # of one picture
        if self.kind == KL:
            return cast(Any, self.first_stage_model).decode_bytes(1, shape[2], shape[3])
        # As core estimates it; a KL autoencoder needs less.
        return 17 * self.width * shape[2] * shape[3] * self.upscale_ratio**2 * mm.dtype_size(dtype)

    def memory_used_encode(self, shape: Any, dtype: torch.dtype) -> float:
        return 14 * self.width * shape[2] * shape[3] * mm.dtype_size(dtype)

    # --- decoding

    def decode(self, samples_in: Tensor, vae_options: dict[str, Any] | None = None) -> Tensor:
        """Latents [B, C, h, w] to pictures [B, H, W, 3] in 0..1."""
        latents = _checked_latents(samples_in, self.latent_channels, self.name, self.kind)
        pictures = self._in_chunks(latents, self._decode, self.memory_used_decode)
        if pictures is not None:
            return pictures.movedim(1, -1)
        tile = max(1, 256 // self.upscale_ratio)
        return self.decode_tiled(latents, tile, tile, tile // 4)

    def decode_now(self, latents: Tensor) -> Tensor:
        """As :meth:`decode`, for a preview: the decoder is loaded, the latents are on its device. Values that are not finite become grey,
        because a preview must not end the run."""
        pictures = self._pixels(latents).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return (pictures / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    def decode_tiled(
        self, samples: Tensor, tile_x: int = 64, tile_y: int = 64, overlap: int = 16, **of_videos: Any
    ) -> Tensor:
        """As :meth:`decode`, in blended tiles; sizes in latent positions."""
        latents = _checked_latents(samples, self.latent_channels, self.name, self.kind)
        tile = (max(1, tile_y), max(1, tile_x))
        _load([self.patcher], self.memory_used_decode((1, 1, *tile), self.vae_dtype))
        out = self._tiled(latents, self._decode, tile, overlap, self.upscale_ratio, self.output_channels)
        return out.movedim(1, -1)

    def _decode(self, latents: Tensor) -> Tensor:
        pictures = self._pixels(latents)
        if not bool(pictures.isfinite().all()):
            expect_usual_size(latents, "samples")  # otherwise it is the decoder's fault
        return (expect_finite(pictures, self.name) / 2 + 0.5).clamp(0, 1)

    def _pixels(self, latents: Tensor) -> Tensor:
        """What the network decodes, fp32 [B, 3, H, W] in about -1..1."""
        return self.first_stage_model.decode(latents.to(self.device, self.vae_dtype)).float()

    # --- encoding

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] in 0..1, of any size, to latents of the model's size."""
        size = (self.side, self.side)
        latents = self._in_chunks(
            _checked_pixels(pixel_samples),
            lambda pixels: self._encode(scaled(pixels, size)),
            lambda _, dtype: self.memory_used_encode((1, 3, *size), dtype),
        )
        return self.encode_tiled(pixel_samples, 256, 256, 64) if latents is None else latents

    def encode_tiled(
        self, pixel_samples: Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 64, **of_videos: Any
    ) -> Tensor:
        """As :meth:`encode`, in blended tiles; sizes in pixels."""
        stride = self.downscale_ratio
        pixels = scaled(_checked_pixels(pixel_samples), (self.side, self.side))
        tile = tuple(max(1, side // stride) * stride for side in (tile_y, tile_x))
        _load([self.patcher], self.memory_used_encode((1, 1, *tile), self.vae_dtype))
        overlap = min(overlap, *(side // 2 for side in tile)) // stride * stride
        return self._tiled(pixels, self._encode, tile, overlap, 1 / stride, self.latent_channels)

    def _encode(self, pixels: Tensor) -> Tensor:
        net, x = self.first_stage_model, pixels.to(self.device, self.vae_dtype) * 2 - 1
        if self.kind == VQ:  # codes hide features that are not finite
            features = expect_finite(net.features(x), self.name, "features")
            return net.vectors(net.codes(features)).float()
        return expect_finite(net.encode(x)[0].float(), self.name, "latents")

    # --- shared

    def _in_chunks(
        self, x: Tensor, work: Callable[[Tensor], Tensor], memory: Callable[[Any, torch.dtype], float]
    ) -> Tensor | None:
        """The result for a batch; None if memory is insufficient for one entry."""
        need = memory(x.shape, self.vae_dtype)
        _load([self.patcher], need)
        chunk = max(1, int(mm.get_free_memory(self.device) / max(1.0, need)))

        def part(x: Tensor) -> Tensor:
            mm.throw_exception_if_processing_interrupted()
            return work(x).to(self.output_device)

        try:
            return torch.cat(in_chunks(part, x, chunk, mm.soft_empty_cache))
        except RuntimeError as problem:
            if not out_of_memory(problem):
                raise
        mm.soft_empty_cache()
        return None

    def _tiled(
        self, x: Tensor, work: Callable[[Tensor], Tensor], tile: Any, overlap: int, scale: float, channels: int
    ) -> Tensor:
        sizes = {"tile_x": tile[1], "tile_y": tile[0], "overlap": overlap}
        bar = comfy.utils.ProgressBar(len(x) * comfy.utils.get_tiled_scale_steps(x.shape[3], x.shape[2], **sizes))
        about = {"upscale_amount": scale, "out_channels": channels, "output_device": self.output_device, "pbar": bar}
        with enough_memory("memory: it is insufficient for one tile; take smaller tiles, or unload other models."):
            return comfy.utils.tiled_scale(x, work, **sizes, **about)
