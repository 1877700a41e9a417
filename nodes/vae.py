"""Decoders on ComfyUI's VAE socket: of the MARs KL autoencoders, of the token models VQ tokenizers, and of BitDance
binary autoencoders.

They are ComfyUI's VAE (``comfy.sd.VAE``) with networks, sizes and checks of this pack. A node that is for videos,
sounds or meshes gets a sentence where it asks for what an autoencoder of images lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from ..errors import NotOfImages, NotReadHere, UserError, not_finite
from ..memory import in_chunks, out_of_memory
from ..networks.autoencoder import (
    STATED_GROUPS,
    USUAL_GROUPS,
    KLAutoencoder,
    KLModel,
    LatentAutoencoder,
    VQAutoencoder,
    VQModel,
)
from ..networks.binary import BinaryAutoencoder, BinaryModel
from ..networks.precision import is_finite
from ..networks.torch_state import in_own_state
from ..runs.images import expect_usual_size, scaled, to_rgb
from . import host
from .schema import expect_image, expect_latents, models_of_decoders

# Kinds of autoencoders that differ here, which are families of files.
KL = "kl"
VQ = "vq"
BITS = "bitdance-ae"
# Inputs by which ComfyUI's nodes for videos are recognised. They take a batch of images for one video, and would make
# of its latents what no model reads.
_OF_VIDEOS = {"length", "video_frames", "frame_idx", "noise_augmentation"}


def mark(samples: Tensor, kind: str) -> Tensor:
    """Note on a tensor which autoencoder decodes it.

    Operations on the tensor lose the note, and then nothing is checked.
    """
    samples.fastar_latents = kind  # type: ignore[attr-defined]
    return samples


def kind_of(samples: Any) -> str:
    """The kind of autoencoder that :func:`mark` noted, "" if it is unknown."""
    return str(getattr(samples, "fastar_latents", ""))


def _checked_latents(samples: Any, channels: int, name: str, kind: str = "") -> Tensor:
    """Latents [B, C, h, w] for a decoder of that name and kind, checked as by :func:`expect_latents`."""
    made = kind_of(samples)
    if kind and made not in ("", kind):
        models = models_of_decoders()
        raise UserError(
            f"samples: these latents come from {models[made]}, but the decoder {name} is for latents from "
            f"{models[kind]}; connect the vae output of the loader whose model generated these latents."
        )

    latents = expect_latents(samples, "samples")
    if latents.shape[1] != channels:
        raise UserError(
            f"samples: the latents have {latents.shape[1]} channels, but the decoder {name} reads latents of "
            f"{channels} channels; connect the vae output of the loader whose model generated these latents."
        )
    return latents


def _checked_pixels(images: Any) -> Tensor:
    """Images [B, H, W, C] of VAE Encode, checked, to [B, 3, H, W]."""
    return to_rgb(expect_image(images, "pixels")).movedim(-1, 1)


class FastARVAE(host.images.VAE):
    """A decoder as ComfyUI's VAE: the methods that use the network are its own, all other methods are ComfyUI's.

    Latents are in the network's scale; samplers have divided by their latent scale. Encoding is deterministic: it
    returns the mean of the posterior, the vectors of the nearest codes, or the bits. All networks normalise by
    statistics of the whole image: binary autoencoders and decoders that enlarge refuse tiles; all other decoders say
    that tiles change the image.

    Args:
        net: decodes to images in about -1..1 and encodes them to (latents, ...).
        stride: pixels per latent position and side of an image that is encoded.
        channels: of latents.
        width: channels of the widest full-resolution layer, for the memory estimate.
        sizes: heights and widths of the images that the model's latents are encoded from, in pixels, the usual one
            first. An image of none of them is scaled to the one of the most similar shape before it is encoded.
        kind: the decoder of the model's family; latents of another kind are refused.
        enlarges: how many times higher and wider than ``sizes`` images are decoded.
    """

    # ComfyUI's names that are the same for every decoder of this pack. Others may use the network by themselves: they
    # load it whole, because not all of its layers can stay on the offload device.
    latent_dim = 2
    output_channels = 3
    working_dtypes = [torch.bfloat16, torch.float32]
    disable_offload = True
    crop_input = False  # images are scaled
    pad_channel_value = None
    handles_tiling = False
    format_encoded = None
    extra_1d_channel = None
    not_video = False
    upscale_index_formula = None

    def __init__(
        self,
        net: KLAutoencoder | VQAutoencoder | BinaryAutoencoder,
        name: str,
        stride: int,
        channels: int,
        width: int,
        sizes: Sequence[tuple[int, int]],
        kind: str = "",
        enlarges: int = 1,
    ):
        self.first_stage_model = net
        self.name = name
        self.width = width
        self.sizes = tuple(sizes)
        self.kind = kind

        # ComfyUI's names.
        self.size = None  # in bytes; model_size() counts them
        self.downscale_ratio = stride
        self.upscale_ratio = stride * enlarges
        self.latent_channels = channels
        self.device = host.devices.get_vae_device()
        self.output_device = host.devices.get_output_device()
        self.vae_dtype = next(net.parameters()).dtype
        self.patcher = host.memory.make_patcher(net, self.device, host.devices.get_vae_offload_device())

    def __str__(self) -> str:
        """For people: what ComfyUI's Preview as Text shows."""
        height, width = self.sizes[0]
        enlarges = self.upscale_ratio // self.downscale_ratio
        drawn = f"{width * enlarges} x {height * enlarges}"
        return f"The autoencoder {self.name}; it decodes latents to images of {drawn} pixels."

    def spacial_compression_encode(self) -> int:
        """Pixels per latent position and side; nodes for videos often ask for them first."""
        self._expect_node_of_images()
        return self.downscale_ratio

    def process_input(self, images: Tensor) -> Tensor:
        """Images in 0..1 as the network's images in -1..1."""
        return images * 2 - 1

    def process_output(self, images: Tensor) -> Tensor:
        """Images of the network, in about -1..1, to 0..1: in place, as ComfyUI's method, whose callers may ignore the
        result.
        """
        return images.div_(2).add_(0.5).clamp_(0, 1)

    @property
    def audio_sample_rate(self) -> int:
        raise self._made_for("sounds")

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            if name == "downscale_index_formula":
                raise NotOfImages("frames")
            if name.startswith("__"):
                raise AttributeError(name)
            raise NotReadHere("vae", name)

    def get_sd(self) -> dict[str, Tensor]:
        """Weights, for ComfyUI's Save VAE, which keeps no metadata of ours: what these say is among the weights."""
        weights = dict(self.first_stage_model.state_dict())
        groups = self.first_stage_model.config.groups
        if groups != USUAL_GROUPS:
            weights[STATED_GROUPS] = torch.tensor(groups)
        return weights

    # --- the tokenizer of a token model

    @property
    def tokenizer(self) -> VQModel:
        """The VQ tokenizer; only of the kind VQ."""
        return VQModel(cast(VQAutoencoder, self.first_stage_model), self.name)

    @in_own_state
    def vectors(self, codes: Tensor) -> Tensor:
        """Code vectors [B, C, h, w], a LATENT, of codes int64 [B, h, w], on the device of the codebook."""
        net = self.tokenizer.net
        return net.vectors(codes.to(net.quantize.embedding.weight.device))

    # --- memory, in bytes

    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> float:
        """For one image of latents of this shape [B, C, h, w]."""
        height, width = shape[-2:]
        if self.kind not in ("", VQ):
            return cast(LatentAutoencoder, self.first_stage_model).decode_bytes(1, height, width)

        # As core estimates it; the others need less.
        pixels = height * width * self.downscale_ratio**2
        values = 17 * self.width * pixels
        if self.upscale_ratio != self.downscale_ratio:
            values += cast(VQAutoencoder, self.first_stage_model).enlarge.live_values(pixels)
        return values * dtype.itemsize

    def memory_used_encode(self, shape: Any, dtype: torch.dtype) -> float:
        """For one image of pixels of this shape [B, 3, H, W]."""
        height, width = shape[-2:]
        return 14 * self.width * height * width * dtype.itemsize

    # --- decoding

    @in_own_state
    def decode(self, samples_in: Tensor, vae_options: dict[str, Any] | None = None) -> Tensor:
        """Latents [B, C, h, w] to images [B, H, W, 3] in 0..1."""
        if vae_options:
            raise NotOfImages(", ".join(vae_options))
        latents = _checked_latents(samples_in, self.latent_channels, self.name, self.kind)

        need = self.memory_used_decode(latents.shape, self.vae_dtype)
        images = self._in_chunks(latents, self._decode, need)
        if images is not None:
            return images.movedim(1, -1)

        # Memory is insufficient for a whole image.
        tile = max(1, 256 // self.downscale_ratio)
        self._check_tiles(
            "samples",
            latents,
            (tile, tile),
            "there is not enough memory to decode the whole image at once, so generate smaller images, or unload "
            "other models",
        )
        return self._decode_in_tiles(latents, (tile, tile), tile // 4)

    @in_own_state
    def decode_now(self, latents: Tensor) -> Tensor:
        """As :meth:`decode`, for a preview: the decoder is loaded, the latents are on its device.

        Values that are not finite become grey, because a preview must not end the run.
        """
        images = self._pixels(latents).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return self.process_output(images).movedim(1, -1)

    @in_own_state
    def decode_tiled(
        self, samples: Tensor, tile_x: int = 64, tile_y: int = 64, overlap: int = 16, **of_videos: Any
    ) -> Tensor:
        """As :meth:`decode`, in blended tiles; sizes in latent positions."""
        latents = _checked_latents(samples, self.latent_channels, self.name, self.kind)
        tile = (max(1, tile_y), max(1, tile_x))
        self._check_tiles(
            "samples", latents, tile, "use VAE Decode instead, and if memory is short, unload other models"
        )
        return self._decode_in_tiles(latents, tile, overlap)

    def _decode_in_tiles(self, latents: Tensor, tile: tuple[int, int], overlap: int) -> Tensor:
        """Images [B, H, W, 3] in 0..1; height and width of a tile, and the overlap, in latent positions."""
        host.memory.load_weights([self.patcher], self.memory_used_decode((1, 1, *tile), self.vae_dtype))
        images = host.images.in_tiles(
            latents,
            self._decode,
            tile=tile,
            overlap=overlap,
            scale=self.upscale_ratio,
            channels=self.output_channels,
            device=self.output_device,
        )
        return images.movedim(1, -1)

    def _decode(self, latents: Tensor) -> Tensor:
        images = self._pixels(latents)
        if not is_finite(images):
            expect_usual_size(latents, "samples")  # otherwise it is the decoder's fault
            raise not_finite("decoder", self.name, "pixels")

        return self.process_output(images)

    def _pixels(self, latents: Tensor) -> Tensor:
        """What the network decodes, fp32 [B, 3, H, W] in about -1..1."""
        on_device = latents.to(self.device, self.vae_dtype)
        return self.first_stage_model.decode(on_device).float()

    # --- encoding

    @in_own_state
    def encode(self, pixel_samples: Tensor, **of_videos: Any) -> Tensor:
        """Images [B, H, W, 3] in 0..1, of any size, to latents of the model's size; a decoded image is larger where the
        decoder enlarges.
        """
        self._expect_node_of_images()
        pixels = _checked_pixels(pixel_samples)
        size = self.size_for(pixels)

        need = self.memory_used_encode((1, 3, *size), self.vae_dtype)
        latents = self._in_chunks(pixels, lambda part: self._encode(scaled(part, size)), need)
        if latents is not None:
            return latents

        # Memory is insufficient for a whole image.
        remedy = (
            "there is not enough memory to encode the whole image at once, so choose smaller images, or unload other "
            "models"
        )
        return self._encode_in_tiles(scaled(pixels, size), (256, 256), 64, remedy)

    @in_own_state
    def encode_tiled(
        self, pixel_samples: Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 64, **of_videos: Any
    ) -> Tensor:
        """As :meth:`encode`, in blended tiles; sizes in pixels."""
        pixels = _checked_pixels(pixel_samples)
        pixels = scaled(pixels, self.size_for(pixels))
        return self._encode_in_tiles(
            pixels, (tile_y, tile_x), overlap, "use VAE Encode instead, and if memory is short, unload other models"
        )

    def _encode_in_tiles(self, pixels: Tensor, tile: tuple[int, int], overlap: int, remedy: str) -> Tensor:
        """Latents of images [B, 3, H, W] of one of the model's sizes; height and width of a tile in pixels."""
        # Whole latent positions; tiles overlap by half at most.
        stride = self.downscale_ratio
        height, width = (max(1, side // stride) * stride for side in tile)
        tile = (height, width)
        overlap = min(overlap, height // 2, width // 2) // stride * stride
        self._check_tiles("pixels", pixels, tile, remedy)

        host.memory.load_weights([self.patcher], self.memory_used_encode((1, 1, *tile), self.vae_dtype))
        return host.images.in_tiles(
            pixels,
            self._encode,
            tile=tile,
            overlap=overlap,
            scale=1 / stride,
            channels=self.latent_channels,
            device=self.output_device,
        )

    def _encode(self, pixels: Tensor) -> Tensor:
        x = self.process_input(pixels.to(self.device, self.vae_dtype))
        if self.kind == VQ:
            return self.vectors(self.tokenizer.encode(x)).float()

        model = BinaryModel if self.kind == BITS else KLModel
        return model(cast(Any, self.first_stage_model), self.name).encode(x)

    def size_for(self, pixels: Tensor) -> tuple[int, int]:
        """Height and width to which images [B, 3, H, W] are scaled: their own size if the model has it, else the size
        of the model whose latents are decoded to their own size, else the size with the most similar shape.
        """
        _, _, height, width = pixels.shape
        if (height, width) in self.sizes:
            return height, width

        enlarges = self.upscale_ratio // self.downscale_ratio
        if (height / enlarges, width / enlarges) in self.sizes:
            return height // enlarges, width // enlarges

        def unlike(size: tuple[int, int]) -> float:
            return abs(math.log(size[0] / size[1]) - math.log(height / width))

        return min(self.sizes, key=unlike)

    # --- shared

    def _expect_node_of_images(self) -> None:
        """Raise a UserError if the node that runs is for videos."""
        if _OF_VIDEOS & host.queue.running_inputs().keys():
            raise self._made_for("videos")

    def _made_for(self, others: str) -> UserError:
        """The error for a node that is not for images."""
        return UserError(
            f"vae: {self.name} is for single images, but this node is for {others}; connect a VAE for {others}."
        )

    def _check_tiles(self, field: str, x: Tensor, tile: tuple[int, int], remedy: str) -> None:
        """Raise a UserError for useless tiles, and say that other tiles change the image.

        Every network normalises by statistics of the whole image. Tiles of the demo's decoders, which enlarge, differ
        from it by 14 to 63 % of its contrast; official decoders are larger, and their tiles may be of use.

        Args:
            x: [B, C, H, W]; nothing is said if one tile holds all of it.
            tile: height and width, in positions of ``x``.

        Raises:
            UserError: the tiles are useless.
        """
        height, width = x.shape[-2:]
        is_whole = height <= tile[0] and width <= tile[1]
        enlarges = self.upscale_ratio != self.downscale_ratio
        if self.kind == BITS or enlarges and not is_whole:
            raise UserError(
                f"{field}: the decoder {self.name} cannot work in tiles, because it normalises over the whole image; "
                f"{remedy}."
            )

        if not is_whole:
            host.text.remark(
                f"{field}: tiles change the colours and the contrast here, because {self.name} normalises over the "
                f"whole image; {remedy}."
            )

    def _in_chunks(self, x: Tensor, work: Callable[[Tensor], Tensor], need: float) -> Tensor | None:
        """The result for a batch, each entry of which needs ``need`` bytes; None if memory is insufficient for one."""
        host.memory.load_weights([self.patcher], need)
        chunk = max(1, int(host.memory.free_memory(self.patcher) / max(1.0, need)))

        def part(x: Tensor) -> Tensor:
            host.progress.stop_if_cancelled()
            return work(x).to(self.output_device, self.vae_output_dtype())

        try:
            return torch.cat(in_chunks(part, x, chunk, host.memory.empty_cache))
        except RuntimeError as problem:
            if not out_of_memory(problem):
                raise

        host.memory.empty_cache()
        return None
