"""Everything that talks to ComfyUI itself: model folders, devices and memory, progress, interrupt, live preview, VAE.

The only file of the pack that imports ``comfy.*`` or ``folder_paths``. It knows modules, pictures and latents; what a MAR
or a token is, it does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import comfy.model_management as mm
import comfy.utils
import folder_paths
import torch
import torch.nn.functional as F
from comfy.cli_args import LatentPreviewMethod, args
from comfy.model_patcher import ModelPatcher
from PIL import Image
from torch import Tensor, nn

from ..errors import UserError
from .preview import MOST_IMAGES, Canvas

FOLDER = "fastar"
EXTENSIONS = {".safetensors", ".pth", ".pt", ".ckpt"}


# ------------------------------------------------------------------------------------------------ model folders


def register_folders() -> None:
    """Make ``models/fastar`` known to ComfyUI; nothing is created on disk."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER), is_default=True)
    extensions = folder_paths.folder_names_and_paths[FOLDER][1]
    if extensions is not folder_paths.supported_pt_extensions:  # shared by core folders: never ours to change
        extensions.update(EXTENSIONS)


def local_files(*kinds: str) -> list[str]:
    """Names of the weight files in these model folders, as ComfyUI's own menus show them."""
    return [name for kind in kinds for name in folder_paths.get_filename_list(kind)]


def folders(*kinds: str) -> list[Path]:
    """The directories behind these model folders."""
    return [Path(path) for kind in kinds for path in folder_paths.get_folder_paths(kind)]


# ------------------------------------------------------------------------------------------------ memory


def device() -> torch.device:
    """Where networks compute."""
    return mm.get_torch_device()


def offload_device() -> torch.device:
    """Where networks wait."""
    return mm.unet_offload_device()


def text_device() -> torch.device:
    """Where text encoders compute."""
    return mm.text_encoder_device()


def text_offload_device() -> torch.device:
    """Where text encoders wait."""
    return mm.text_encoder_offload_device()


def t5_tokenizer() -> Path | None:
    """The folder of the T5 tokenizer that ComfyUI brings for its own models: the one of all T5 and Flan-T5 sizes."""
    import comfy.text_encoders  # a plain folder: nothing is run

    for place in comfy.text_encoders.__path__:
        folder = Path(place) / "t5_tokenizer"
        if (folder / "tokenizer.json").is_file():
            return folder
    return None


def to_output(x: Tensor) -> Tensor:
    """A tensor as it travels between nodes: fp32 on the intermediate device."""
    return x.to(mm.intermediate_device(), torch.float32)


@dataclass(eq=False)
class Loaded:
    """What travels on a model socket. It owns the patcher, because ComfyUI's list of loaded models holds no reference.

    Attributes:
        model: the family's model object; its ``net`` is what the patcher manages.
        patcher: ComfyUI's handle for moving the weights.
        vae: the decoder of the same loader, for live previews; or None.
        parts: more networks of the same loader by what they are for. Each has a patcher of its own, and so takes memory on the
            device only while it is needed.
    """

    model: Any
    patcher: ModelPatcher
    vae: FastARVAE | None = None
    parts: Mapping[str, Loaded] = field(default_factory=dict)

    @staticmethod
    def of(model: Any, vae: FastARVAE | None = None, parts: Mapping[str, Loaded] | None = None) -> Loaded:
        """Put a model (with attribute ``net``) under ComfyUI's memory management."""
        return Loaded(model, ModelPatcher(model.net, device(), offload_device()), vae, parts or {})


class Managed(Protocol):
    """Whatever ComfyUI can load: a model, a decoder, an upscaler."""

    patcher: ModelPatcher


def to_device(
    loaded: Loaded, memory: float, latents: tuple[int, int, int, int], others: Sequence[Managed] = ()
) -> None:
    """Bring a model, and the decoder for its previews, onto the compute device.

    Args:
        loaded: from a model socket.
        memory: bytes of work to make room for.
        latents: shape of what will be previewed.
        others: more models that the work needs at the same time.
    """
    patchers = [loaded.patcher, *(other.patcher for other in others)]
    if loaded.vae is not None and previews_wanted():
        patchers.append(loaded.vae.patcher)
        memory += min(MOST_IMAGES, latents[0]) * loaded.vae.memory_used_decode(latents, loaded.vae.vae_dtype)
    _load(list(dict.fromkeys(patchers)), memory)


class Keep:
    """Holds one thing that is dear to load, for as long as ComfyUI keeps its weights loaded.

    A node has no memory between runs. What is kept goes when something else is put in, or when ComfyUI unloads the
    weights, to make room or because a person asked for it.

    Args:
        place: where its weights compute and where they wait; a text encoder's by default.
    """

    def __init__(
        self, place: tuple[Callable[[], torch.device], Callable[[], torch.device]] = (text_device, text_offload_device)
    ) -> None:
        self._place = place
        self._key: Any = None
        self._loaded: Loaded | None = None

    def get(self, key: Any, load: Callable[[], Any]) -> Loaded:
        """What was kept under ``key``, else what ``load`` gives (an object with ``net``), which is kept from now on."""
        if self._loaded is None or self._key != key:
            self._loaded = None  # before the next one takes memory
            model = load()
            patcher = _Tidy(model.net, *(where() for where in self._place))
            patcher.gone = self._drop
            self._loaded, self._key = Loaded(model, patcher), key
        return self._loaded

    def _drop(self, patcher: ModelPatcher) -> None:
        if self._loaded is not None and self._loaded.patcher is patcher:
            self._loaded = None


class _Tidy(ModelPatcher):
    """A patcher that says when its weights are unloaded."""

    gone: Callable[[ModelPatcher], None] | None = None

    def detach(self, unpatch_all: bool = True) -> Any:
        out = super().detach(unpatch_all)
        if self.gone is not None:
            self.gone(self)
        return out


def bring(loaded: Loaded, memory: float) -> None:
    """Bring a model that draws no picture (a text encoder, a language model) onto its device, with ``memory`` bytes of room to work."""
    _load([loaded.patcher], memory)


def _load(patchers: list[ModelPatcher], memory: float) -> None:
    """Networks onto their devices, whole: of plain torch layers ComfyUI cannot leave a part behind and stream it."""
    mm.load_models_gpu(patchers, memory_required=memory, force_full_load=True)
    for patcher in patchers:
        # --novram leaves them where they were all the same. A patcher of core's (an upscale model's) may stream: that one knows better.
        streams = getattr(patcher, "is_dynamic", bool)()
        if not streams and any(p.device.type != patcher.load_device.type for p in patcher.model.parameters()):
            patcher.model.to(patcher.load_device)


# ------------------------------------------------------------------------------------------------ driving a sampler


def previews_wanted() -> bool:
    """Whether previews are switched on (command line, or the setting of this run)."""
    return args.preview_method != LatentPreviewMethod.NoPreviews


def drive(sampler: Any, vae: FastARVAE | None = None, latents: Callable[[Any], Tensor] = attrgetter("latents")) -> Any:
    """Run a sampler generator to its end with progress bar, cancel and live preview.

    Args:
        sampler: yields objects with ``done``, ``total`` and ``decided`` bool [B, gh, gw]; is sent the seconds that the drive
            itself took since.
        vae: its decoder, on the device; None for no preview.
        latents: what it yields to latents [B, C, h, w]; only asked when a preview is drawn.

    Returns:
        What the generator returns.
    """
    canvas = Canvas(vae.decode_now) if vae is not None and previews_wanted() else None
    bar: comfy.utils.ProgressBar | None = None
    spent: float | None = None
    try:
        while True:
            # ProgressBar asks too, but is throttled: without this a cancel could wait several steps.
            mm.throw_exception_if_processing_interrupted()
            try:
                step = sampler.send(spent)
            except StopIteration as end:
                return end.value
            wanted = canvas is not None and (canvas.due() or step.done == step.total)
            if wanted:
                _wait(step.decided.device)
            began = time.perf_counter()
            picture = _preview(canvas, step, latents) if wanted else None
            bar = bar or comfy.utils.ProgressBar(step.total)
            bar.update_absolute(step.done, step.total, picture)
            spent = time.perf_counter() - began
    finally:
        sampler.close()


def _preview(canvas: Canvas | None, step: Any, latents: Callable[[Any], Tensor]) -> tuple[str, Image.Image, int] | None:
    """What ProgressBar takes as a picture. Short memory costs the preview, not the run."""
    try:
        return (
            ("JPEG", Image.fromarray(canvas.draw(latents(step), step.decided)), args.preview_size) if canvas else None
        )
    except RuntimeError as problem:
        if not _out_of_memory(problem):
            raise
        return None


def _wait(where: torch.device) -> None:
    """Let queued work finish, so that it is not taken for the preview's."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def progress() -> Callable[[int, int], None]:
    """A callback (done, total) for anything else that takes long, a download say; it passes a cancel on."""
    bar: list[comfy.utils.ProgressBar] = []

    def tell(done: int, total: int) -> None:
        mm.throw_exception_if_processing_interrupted()
        if total > 0:
            bar.extend([] if bar else [comfy.utils.ProgressBar(total)])
            bar[0].update_absolute(min(done, total), total)

    return tell


# ------------------------------------------------------------------------------------------------ upscale models


class Upscaler:
    """An UPSCALE_MODEL as a function. Its weights are managed with those of whoever calls it, see :func:`to_device`.

    Args:
        model: what core's Load Upscale Model gives.
    """

    # Pixels per side that go through at once, and what of them is shared with the neighbours; as core has it.
    tile, least, overlap = 512, 128, 32

    def __init__(self, model: Any):
        self._model = model
        # Older ones hold no patcher.
        self.patcher = getattr(model, "patcher", None) or ModelPatcher(model.model, device(), offload_device())
        kind = getattr(getattr(model, "architecture", None), "name", None) or type(model.model).__name__
        self.name = f"{kind} x{model.scale:g}"

    @staticmethod
    def fits(value: Any) -> bool:
        """Whether a value is an UPSCALE_MODEL for colour pictures."""
        scale = getattr(value, "scale", None)
        colours = {getattr(value, name, 3) for name in ("input_channels", "output_channels")}
        works = callable(value) and isinstance(getattr(value, "model", None), nn.Module)
        return works and isinstance(scale, (int, float)) and scale > 0 and colours == {3}

    def memory(self, height: int, width: int) -> float:
        """Bytes to make room for, for pictures of that size; core's own estimate."""
        return min(self.tile, height) * min(self.tile, width) * 3 * 4 * max(self._model.scale, 1.0) * 384.0

    def __call__(self, pictures: Tensor) -> Tensor:
        """Pictures fp32 [B, 3, H, W] in 0..1 to larger ones; of large ones tile after tile."""
        x, tile = pictures.to(self.patcher.load_device), self.tile
        while True:
            try:
                return comfy.utils.tiled_scale(
                    x, self._piece, tile, tile, self.overlap, upscale_amount=self._model.scale, output_device=x.device
                ).clamp(0, 1)
            except RuntimeError as problem:
                if not _out_of_memory(problem) or tile // 2 < self.least:
                    raise
            mm.soft_empty_cache()
            tile //= 2

    def _piece(self, x: Tensor) -> Tensor:
        mm.throw_exception_if_processing_interrupted()
        return self._model(x.float())


# ------------------------------------------------------------------------------------------------ VAE


class FastARVAE:
    """A decoder as core's VAE nodes expect it: decode, encode, their tiled forms, and the figures they ask for.

    Latents here are the network's own: samplers have divided by their latent scale already. Encoding gives the posterior's
    mean, or the vectors of the nearest codes, so that it is the same every time.

    Args:
        net: ``decode(z)`` -> pictures about -1..1, ``encode(x)`` -> (latents, anything); x in -1..1.
        name: what a person calls it.
        stride: pixels a latent position covers, per side.
        channels: latent channels.
        width: channels of the widest full-resolution layer, for the memory estimate.
    """

    def __init__(self, net: nn.Module, name: str, stride: int, channels: int, width: int):
        self.first_stage_model, self.name, self.width = net, name, width
        self.downscale_ratio = self.upscale_ratio = stride
        self.latent_channels, self.latent_dim, self.output_channels = channels, 2, 3
        self.device, self.output_device = mm.vae_device(), mm.intermediate_device()
        self.vae_dtype = next(net.parameters()).dtype
        # Plain torch layers: not the streaming patcher, which needs ComfyUI's own.
        self.patcher = ModelPatcher(net, self.device, mm.vae_offload_device())

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio

    def spacial_compression_encode(self) -> int:
        return self.downscale_ratio

    def temporal_compression_decode(self) -> None:
        return None

    def throw_exception_if_invalid(self) -> None:
        """Core asks; a decoder that loaded is valid."""

    def get_sd(self) -> dict[str, Tensor]:
        """Weights, for core's Save VAE."""
        return self.first_stage_model.state_dict()

    # How core estimates: activations of the full-resolution layers, an element a byte count each.
    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> float:
        return 17 * self.width * shape[2] * shape[3] * self.upscale_ratio**2 * mm.dtype_size(dtype)

    def memory_used_encode(self, shape: Any, dtype: torch.dtype) -> float:
        return 14 * self.width * shape[2] * shape[3] * mm.dtype_size(dtype)

    # --- decoding

    def decode(self, samples_in: Tensor, vae_options: dict[str, Any] | None = None) -> Tensor:
        """Latents [B, C, h, w] to pictures [B, H, W, 3] in 0..1."""
        latents = self._checked(samples_in)
        try:
            return self._in_chunks(latents, self._decode, self.memory_used_decode).movedim(1, -1)
        except RuntimeError as problem:
            if not _out_of_memory(problem):
                raise
        mm.soft_empty_cache()
        tile = max(1, 256 // self.upscale_ratio)
        return self.decode_tiled(latents, tile, tile, tile // 4)

    def decode_now(self, latents: Tensor) -> Tensor:
        """As :meth:`decode`, for latents that lie on the device beside the loaded decoder: nothing is moved or managed."""
        return self._decode(latents).movedim(1, -1)

    def decode_tiled(
        self,
        samples: Tensor,
        tile_x: int = 64,
        tile_y: int = 64,
        overlap: int = 16,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """As :meth:`decode`, in blended tiles; sizes in latent positions."""
        latents = self._checked(samples)
        tile = (max(1, tile_y), max(1, tile_x))
        _load([self.patcher], self.memory_used_decode((1, 1, *tile), self.vae_dtype))
        out = self._tiled(latents, self._decode, tile, overlap, self.upscale_ratio, self.output_channels)
        return out.movedim(1, -1)

    def _decode(self, latents: Tensor) -> Tensor:
        x = self.first_stage_model.decode(latents.to(self.device, self.vae_dtype))
        return (x.float() / 2 + 0.5).clamp(0, 1)

    # --- encoding

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] in 0..1 to latents; cropped to whole strides around the middle, as core does."""
        pixels = self._fitted(pixel_samples)
        try:
            return self._in_chunks(pixels, self._encode, self.memory_used_encode)
        except RuntimeError as problem:
            if not _out_of_memory(problem):
                raise
        mm.soft_empty_cache()
        return self.encode_tiled(pixel_samples, 256, 256, 64)

    def encode_tiled(
        self,
        pixel_samples: Tensor,
        tile_x: int = 512,
        tile_y: int = 512,
        overlap: int = 64,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """As :meth:`encode`, in blended tiles; sizes in pixels."""
        pixels, stride = self._fitted(pixel_samples), self.downscale_ratio
        tile = tuple(max(1, side // stride) * stride for side in (tile_y, tile_x))
        _load([self.patcher], self.memory_used_encode((1, 1, *tile), self.vae_dtype))
        overlap = min(overlap, *(side // 2 for side in tile)) // stride * stride
        return self._tiled(pixels, self._encode, tile, overlap, 1 / stride, self.latent_channels)

    def _encode(self, pixels: Tensor) -> Tensor:
        return self.first_stage_model.encode(pixels.to(self.device, self.vae_dtype) * 2 - 1)[0].float()

    # --- shared

    def _checked(self, samples: Any) -> Tensor:
        if not isinstance(samples, Tensor) or samples.ndim not in (4, 5):
            raise UserError(f"samples: {self.name} decodes latents [B, C, h, w]; connect a LATENT made for it.")
        latents = samples[:, :, 0] if samples.ndim == 5 else samples
        if latents.shape[1] != self.latent_channels:
            raise UserError(
                f"samples: these latents have {latents.shape[1]} channels, the decoder {self.name} reads "
                f"{self.latent_channels}; connect the VAE of the loader that made them."
            )
        return latents

    def _fitted(self, pictures: Any) -> Tensor:
        """[B, H, W, C] to [B, 3, H', W'], whole strides: cropped around the middle, or grown by its edge to one stride."""
        if not isinstance(pictures, Tensor) or pictures.ndim != 4 or 0 in pictures.shape:
            raise UserError("pixels: VAE Encode needs pictures; connect an IMAGE.")
        x = pictures.expand(*pictures.shape[:3], 3) if pictures.shape[3] == 1 else pictures[..., :3]
        x = x.movedim(-1, 1)
        for dim in (2, 3):
            size, stride = x.shape[dim], self.downscale_ratio
            if size >= stride:
                x = x.narrow(dim, size % stride // 2, size // stride * stride)
            else:
                x = F.pad(x, (0, stride - size, 0, 0) if dim == 3 else (0, 0, 0, stride - size), mode="replicate")
        return x

    def _in_chunks(
        self, x: Tensor, work: Callable[[Tensor], Tensor], memory: Callable[[Any, torch.dtype], float]
    ) -> Tensor:
        need = memory(x.shape, self.vae_dtype)
        _load([self.patcher], need)
        chunk = max(1, int(mm.get_free_memory(self.device) / max(1.0, need)))
        parts = []
        for at in range(0, len(x), chunk):
            mm.throw_exception_if_processing_interrupted()
            parts.append(work(x[at : at + chunk]).to(self.output_device))
        return torch.cat(parts)

    def _tiled(
        self,
        x: Tensor,
        work: Callable[[Tensor], Tensor],
        tile: tuple[int, ...],
        overlap: int,
        scale: float,
        channels: int,
    ) -> Tensor:
        across = comfy.utils.get_tiled_scale_steps(x.shape[3], x.shape[2], tile[1], tile[0], overlap)
        bar = comfy.utils.ProgressBar(len(x) * across)
        return comfy.utils.tiled_scale(
            x,
            work,
            tile[1],
            tile[0],
            overlap,
            upscale_amount=scale,
            out_channels=channels,
            output_device=self.output_device,
            pbar=bar,
        )


def _out_of_memory(problem: RuntimeError) -> bool:
    """Every back end has an error of its own; they agree on the words."""
    return isinstance(problem, torch.cuda.OutOfMemoryError) or "out of memory" in str(problem).lower()
