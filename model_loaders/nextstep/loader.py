"""Loaders of NextStep: the language model with its head and its tokenizer, and the autoencoder of its tokens.

A model is a folder in the authors' layout: config.json, shards of 32 or 16 bits, the tokenizer, and in ``vae`` the
autoencoder, ``checkpoint.pt`` with its own config.json. A folder without ``vae`` takes the one beside it. Code in these
folders is never run. The output layer for words and the table of image positions are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...networks.autoencoder import KLConfig, KLModel
from ...networks.nextstep import (
    LatentConfig,
    Marks,
    NextStep,
    NextStepAutoencoder,
    NextStepConfig,
    NextStepModel,
    side_of,
    trunk_of,
)
from ...networks.ops import FAST, TORCH, Operations
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.configs import REMEDY, expect_fixed, expect_language, expect_stated, language_numbers, language_part
from ..files.tokenizer import load_tokenizer
from ..files.wrappers import AUTO
from ..kinds import Precision, choose_bits, choose_dtype, read

# What a NextStep does not compute: the output layer for words, a table of positions that no published model uses,
# recomputed RoPE frequencies.
UNUSED = re.compile(r"(?:lm_head\.|gen_pos_embed$|rotary_emb\.)")
# Classes of the published programs, which the configuration names.
_TYPES = ("nextstep", "stepx_llama")
# Fields of the two spellings of the configuration.
_PATCH = ("latent_patch_size", "patch_size")
_CHANNELS = ("latent_channels", "num_channels")
# Switches of the programs that no published model has on.
_OFF = ("use_gen_pos_embed", "attention_use_qk_norm", "use_mlp_before_lm_head", "mlp_bias")
# The special tokens by name, and the fields in which the configuration states their ids.
_AREA = "<|image_area|>"
_BEGIN = "<|begin_of_image|>"
_END = "<|end_of_image|>"
_PLACE = "<|image_placeholder|>"
STATED_IDS = {"boi": _BEGIN, "eoi": _END, "image_placeholder_id": _PLACE}
_OWN_TOKENIZER = "replace the tokenizer with the one that belongs to this model"
# The autoencoder in or beside the folder of a model.
_WEIGHTS = "checkpoint.pt"
_INSIDE = "vae"
_BESIDE = "NextStep-1-f8ch16-Tokenizer"
# Pixels along a side of a latent of the published autoencoder.
_STRIDE = 8
# What the programs of August 2025 take for fields that are missing: Flux's numbers.
_FLUX = {"scaling_factor": 0.3611, "shift_factor": 0.1159}


@in_own_state
def load_nextstep(
    path: str | Path,
    dtype: str | Precision = "auto",
    device: str | torch.device = "cpu",
    weights: str = AUTO,
    operations: Operations = FAST,
) -> NextStepModel:
    """Load a NextStep-1 or 1.1 with its tokenizer. Shared arguments and errors: see :mod:`.checkpoint`.

    The dtype "auto" prefers bf16, in which the models were trained; weights are cast one by one as they are read. The
    last layer of the head is fp32.

    Args:
        path: a model folder, one of its shards, or their index.
        dtype: see :func:`.kinds.choose_dtype`.
        device: of the weights.
        weights: see :func:`.checkpoint.read`.
        operations: of which the network is built, see :class:`.ops.Operations`.

    Raises:
        UserError: also if the configuration is missing, states another network, or names other ids than the tokenizer.
    """
    compute = choose_dtype(dtype, device, "nextstep")
    file = read(path, "nextstep", lambda name: UNUSED.search(name) is not None, weights)
    config = _config(file)
    net = ck.load_strictly(
        file,
        partial(NextStep, config),
        operations=operations,
        dtype=compute,
        fp32=("image_head.net.final_layer.linear.",),
        device=device,
        bits=choose_bits(dtype, device),
    )
    tokenizer = load_tokenizer(file.folder, file.stem, file.metadata, words=True)
    return NextStepModel(
        net=net,
        name=file.name,
        stride=_stride(file) * config.patch,
        tokenize=tokenizer.encode,
        marks=_marks(file, tokenizer.special_tokens, config.vocab),
        side=side_of(f"{file.name} {file.path.name}"),
        note=file.note,
    )


def _config(file: ck.Checkpoint) -> NextStepConfig:
    """The shape of the weights, and the numbers that only the configuration states."""
    settings = file.settings("config", beside=True)
    if not settings:
        raise file.error(
            "has no config.json, from which FastAR reads the model's norms and positions",
            "put the config.json of this model into the folder",
        )
    if any(name.endswith("self_attn.o_proj.bias") for name in file.state):
        raise file.error("has biases in o_proj, which no published NextStep has", "choose a different model")

    fields = language_part(file, settings)
    expect_fixed(file, fields, {"model_type": _TYPES, **dict.fromkeys(_OFF, (False,))})
    fields.pop("model_type", None)
    patch = _first(file, fields, _PATCH, 2)
    with ck.misfits(file):
        trunk = trunk_of(file.state)
        config = NextStepConfig.of_nextstep(file.state, patch, **language_numbers(file, fields, trunk))

    expect_language(file, fields, config, config.vocab)
    proved = {"fm_head_dim": config.head_width, "fm_head_layers": config.head_depth}
    expect_stated(file, fields, {**proved, **dict.fromkeys(_CHANNELS, config.channels)})
    return config


def _first(file: ck.Checkpoint, fields: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """The first of the whole numbers of these names that the configuration states."""
    found = (file.number(name, None, 1, 64, fields) for name in names)
    return next((number for number in found if number is not None), default)


def _marks(file: ck.Checkpoint, named: Mapping[str, int], rows: int) -> Marks:
    """Ids of the special tokens by their names, which the configuration must not contradict."""
    missing = [name for name in (_AREA, _BEGIN, _END, _PLACE) if name not in named]
    if missing:
        raise file.error(f"has a tokenizer without {missing[0]}", _OWN_TOKENIZER)

    settings = file.settings("config", beside=True)
    for field, name in STATED_IDS.items():
        if file.number(field, named[name], 0, 1 << 31, settings) != named[name]:
            raise file.error(
                f"states {field} = {settings[field]} in its configuration, but {name} is {named[name]} in its "
                "tokenizer",
                _OWN_TOKENIZER,
            )

    marks = Marks(named[_AREA], named[_BEGIN], named[_END], named[_PLACE], _start(file, named))
    largest = max(marks.area, marks.begin, marks.end, marks.place, marks.text or 0)
    if largest >= rows:
        raise file.error(
            f"has {rows} token ids, but its tokenizer has special tokens with ids up to {largest}", _OWN_TOKENIZER
        )
    return marks


def _start(file: ck.Checkpoint, named: Mapping[str, int]) -> int | None:
    """The id of the token that begins every text, if the tokenizer's own configuration names one."""
    name = ck.read_json(file.folder / "tokenizer_config.json", file.field).get("bos_token")
    if isinstance(name, dict):
        name = name.get("content")
    if name is None:
        return None
    if name not in named:
        raise file.error(f"has a tokenizer whose bos_token {ck.shown(name)} is not one of its tokens", _OWN_TOKENIZER)
    return named[name]


# ------------------------------------------------------------------------------------------------ autoencoder


def autoencoder_path(path: str | Path) -> Path | None:
    """The weights of the autoencoder in or beside the folder of a model; None if there are none.

    ``path`` is what :func:`load_nextstep` accepts. The configuration may name a folder within (``vae_name_or_path``).
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    stated = ck.read_json(folder / "config.json", "checkpoint").get("vae_name_or_path")
    inside = folder / stated if isinstance(stated, str) and stated else folder / _INSIDE
    if folder not in inside.parents or ".." in inside.parts:
        inside = folder / _INSIDE

    for place in dict.fromkeys((inside, folder / _INSIDE, folder.parent / _BESIDE)):
        if (place / _WEIGHTS).is_file():
            return ck.member(place / _WEIGHTS, "decoder")
    return None


def _stride(file: ck.Checkpoint) -> int:
    """Pixels along a side of a latent, as the configuration of the autoencoder states."""
    found = autoencoder_path(file.path)
    settings = {} if found is None else ck.read_json(found.parent / "config.json", "decoder")
    levels = settings.get("ch_mult")
    return 2 ** (len(levels) - 1) if isinstance(levels, list) and 0 < len(levels) < 8 else _STRIDE


@in_own_state
def load_nextstep_ae(
    path: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    weights: str = AUTO,
    operations: Operations = TORCH,
) -> KLModel:
    """Load the autoencoder of a NextStep; see :mod:`.checkpoint`. The dtype "auto" is fp32.

    ``path`` is ``checkpoint.pt`` or its folder, where config.json states how latents are scaled. Other arguments as
    :func:`.autoencoders.load_kl`.

    Raises:
        UserError: also if the configuration is missing or states another network.
    """
    compute = choose_dtype(dtype, device, "nextstep-ae")
    path = Path(path)
    file = read(path / _WEIGHTS if path.is_dir() else path, "nextstep-ae", weights=weights)
    file = file.filter(lambda name: not name.startswith("loss."))
    with ck.misfits(file):
        config = _latent_config(file, KLConfig.from_state_dict(file.state, file.number("groups", 32, 1, 1024)))

    net = ck.load_strictly(
        file, partial(NextStepAutoencoder, config), operations=operations, dtype=compute, device=device
    )
    folder = file.folder
    name = f"{folder.parent.name} {_INSIDE}" if folder.name == _INSIDE else folder.name
    return KLModel(net, file.text("name", name))


def _latent_config(file: ck.Checkpoint, shape: KLConfig) -> LatentConfig:
    """The shape of an autoencoder, with what its configuration states about latents.

    A configuration that knows no norm is of the programs of August 2025, whose own numbers hold where it states none.
    Later programs scale nothing then, and normalise over single positions.
    """
    settings = file.settings("config", beside=True)
    if not settings:
        raise file.error("has no config.json in its folder, from which FastAR reads how latents are scaled", REMEDY)

    expect_stated(file, settings, {"ch": shape.ch, "num_res_blocks": shape.blocks, "z_channels": shape.z_channels})
    expect_fixed(file, settings, {"encoder_norm": (True, False)})
    usual = {"scaling_factor": 1.0, "shift_factor": 0.0} if "encoder_norm" in settings else _FLUX
    scaling = file.number("scaling_factor", usual["scaling_factor"], 1e-6, 1e6, settings)
    shift = file.number("shift_factor", usual["shift_factor"], -1e6, 1e6, settings)
    norm_patch = file.number("psz", 1, 1, 64, settings) if settings.get("encoder_norm") else 0
    return LatentConfig(**{**vars(shape), "scaling": scaling, "shift": shift, "norm_patch": norm_patch})


def expect_latents(decoder: KLModel, model: NextStepModel) -> None:
    """Raise a UserError if an autoencoder has latents of other channels or of another size than a model samples."""
    config = decoder.net.config
    c = model.net.config
    if (config.z_channels, config.stride * c.patch) == (c.channels, model.stride):
        return

    raise UserError(
        f"decoder: {model.name} needs an autoencoder with {c.channels} channels at stride {model.stride // c.patch}, "
        f"but {decoder.name} has {config.z_channels} channels at stride {config.stride}; choose auto, or the "
        "autoencoder that the model was trained with."
    )
