"""What a model reads of codes, images and latents, with networks that are on the device only for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from weakref import proxy

from ..errors import UserError
from ..memory import enough_memory
from ..model_loaders.janus.loader import load_janus_vision
from ..model_loaders.kinds import choose_dtype
from ..networks.autoencoder import KLModel, VQModel
from ..networks.janus_vision import ImageReader
from ..runs.loading import AUTO, dtype_name, read_images
from ..runs.registry import family_of
from ..samplers.conditioning import AnyCondition, CodeCondition, FeatureCondition, ImagePromptCondition
from ..samplers.editing import Edit
from ..samplers.tokens.features import features_of
from . import host
from .host.loaded import TA_TOK, Loaded, ModelCache, load_to_device
from .vae import FastARVAE

# If memory is insufficient to encode texts, images or codes.
READING = (
    "dtype: there is not enough memory for this model; choose the dtype int8, bf16 or fp16 if the loader offers one "
    "of them, or unload other models."
)

# Upper estimate of the activations of a TA-Tok for the codes of one image, and of a Janus' tower for one image; images
# are read one at a time.
_READER_BYTES = 256 << 20


def edit_codes(edit: Edit, vae: FastARVAE) -> Edit:
    """The edit with codes in the place of latents."""
    net = vae.tokenizer.net
    codebook = net.quantize.embedding.weight
    _, channels = codebook.shape

    latents = edit.start
    if latents.shape[1] != channels:
        raise UserError(
            f"latent_image: it has the shape {list(latents.shape)}, but the model has latents of {channels} channels; "
            "encode the image with VAE Encode and the vae of the model's loader."
        )

    codes = net.codes(latents.to(codebook.device))
    return Edit(codes.cpu(), edit.mask.cpu())


def read_codes(condition: AnyCondition, loaded: Loaded[Any]) -> AnyCondition:
    """Turn semantic codes into features with the model's TA-Tok, which is on the device only for that."""
    if not isinstance(condition, CodeCondition) or TA_TOK not in loaded.parts:
        return condition

    reader = loaded.parts[TA_TOK]
    load_to_device(reader, _READER_BYTES)
    with enough_memory(READING):
        made = features_of(condition, reader.model)

    device = host.devices.get_compute_device()
    return FeatureCondition(tuple(rows.to(device) for rows in made.features), made.names)


_image_reader = ModelCache(host.devices.get_compute_device, host.devices.get_offload_device)


def placed_reader(loaded: Loaded[Any]) -> ImageReader:
    """What reads images for a Janus, on the device with the VQ tokenizer of the same loader."""
    vae = loaded.vae
    path = loaded.model.vision_file

    def load() -> Any:
        compute = host.devices.get_compute_device()
        dtype = dtype_name(choose_dtype(AUTO, compute, "janus"))
        # The cached reader must not keep the tokenizer of a loader that is gone.
        tokenizer = cast(VQModel, proxy(vae.tokenizer))
        offload = host.devices.get_offload_device()
        return load_janus_vision(path, tokenizer, dtype, offload, **host.operations.suited(compute))

    reader = _image_reader.get(path, load)
    side = reader.model.side
    memory = _READER_BYTES + vae.memory_used_encode((1, 3, side, side), vae.vae_dtype)
    host.memory.load_weights([reader.patcher, vae.patcher], memory)
    # The same file may have been loaded again, with another tokenizer.
    return replace(reader.model, vq=vae.tokenizer)


def read_pictures(condition: AnyCondition, loaded: Loaded[Any]) -> AnyCondition:
    """Read the images of a condition with what a model has for that; it is on the device only for that."""
    if not isinstance(condition, ImagePromptCondition):
        return condition

    with enough_memory(READING):
        family = family_of(loaded.model)
        return read_images(condition, _placed_own_reader(loaded) or placed_reader(loaded), family)


def _placed_own_reader(loaded: Loaded[Any]) -> Any:
    """What reads images with the model's decoder, on the device; None for a model that has a part for it."""
    vae = loaded.vae
    if vae is None:
        return None

    reader = family_of(loaded.model).own_reader(loaded.model, KLModel(vae.first_stage_model, vae.name))
    if reader is not None:
        side = max(vae.sizes[0])
        host.memory.load_weights([vae.patcher], vae.memory_used_encode((1, 3, side, side), vae.vae_dtype))
    return reader
