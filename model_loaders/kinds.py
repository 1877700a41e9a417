"""The kinds of weight files: how each is identified by parameter names, chosen, converted to a dtype, and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..networks.quantized import EIGHT_BITS, FEWER_BITS, FP8, INT8, QUANTISED
from .files import checkpoint as ck
from .files.formats import packed_format
from .files.shards import weight_files
from .files.wrappers import AUTO, EMA, TRAINED, is_averaged, listed

# Prefixes that are tried, at most, to find a network within a file; a training's file has three.
_MOST_PREFIXES = 32

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# All that a command may be given. Quantised are the weights in the blocks; everything else is as with "auto".
ALL_DTYPES = (*DTYPES, *QUANTISED)


class Kind(NamedTuple):
    """A kind of weight files: how a file of it is recognised, chosen and converted to a dtype."""

    noun: str  # what messages call a file of the kind
    field: str  # the input that selects its files; messages begin with it
    # Beginnings of parameter names that a file of the kind has, each at least once (of a tuple any); () if it is not
    # identified.
    prefixes: tuple[str | tuple[str, ...], ...] = ()
    folder: bool = False  # whether it may be a model folder
    loader: str = ""  # the node that loads it, if it has one of its own
    decoder: str = ""  # catalogue id of its official decoder
    # 16-bit dtypes that the authors' code offers, and in which tests/model_loaders/test_precision.py compares the
    # kind with fp32; "auto" takes the first one that a GPU computes at full speed, and never another. See also
    # networks/precision.py.
    checked: tuple[str, ...] = ()
    overflows: bool = False  # whether it overflows in fp16
    blocks: bool = False  # whether it has blocks whose weights may be quantised
    # Whether 4 bits are offered. The loss was measured on images, except NextStep's, as docs/precision.md says.
    four_bits: bool = False
    untested: bool = False  # whether it was trained in bf16 and never tried in fp16
    remedy: str = ""  # what to choose in place of a file of the kind where another one is expected
    node: str = ""  # the node with the input ``field``, if loaders of other kinds lack it

    @property
    def input(self) -> str:
        """The input that selects its files, for a message."""
        node = self.loader or self.node
        return f"the input {self.field} of {node}" if node else f"the input {self.field}"


# A file is of the first kind whose prefixes are all there.
KINDS: dict[str, Kind] = {
    "mar": Kind(
        noun="a MAR",
        field="checkpoint",
        prefixes=("diffloss.net.",),
        loader="Load MAR",
        decoder="kl16",
        checked=("fp16",),
        blocks=True,
    ),
    "llamagen": Kind(
        noun="a LlamaGen or PAR",
        field="checkpoint",
        prefixes=("tok_embeddings.weight", "cls_embedding."),
        loader="Load LlamaGen / PAR",
        decoder="vq16-c2i",
        checked=("bf16", "fp16"),
        blocks=True,
        four_bits=True,
    ),
    "t5": Kind(
        noun="a T5 text encoder",
        field="encoder",
        node="LlamaGen Prompt",
        prefixes=("encoder.block.0.layer.0.SelfAttention.",),
        folder=True,
        checked=("bf16",),
        overflows=True,
    ),
    "dtok": Kind(
        noun="a Tar de-tokenizer",
        field="checkpoint",
        prefixes=("tok_embeddings.weight", "clip_proj."),
        loader="Load Tar De-tokenizer",
        decoder="vq16-t2i",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
    ),
    "ta-tok": Kind(
        noun="a TA-Tok",
        field="ta_tok",
        node="Load Tar De-tokenizer",
        prefixes=("bottleneck.regularizer.",),
        checked=("bf16",),
    ),
    "hybrid": Kind(
        noun="a Harmon or UniPic",
        field="checkpoint",
        prefixes=("mar.fake_latent", "llm.model.embed_tokens."),
        folder=True,
        loader="Load Harmon / UniPic",
        decoder="kl16",
        checked=("bf16",),
        overflows=True,
        blocks=True,
    ),
    "tokenizer": Kind(noun="a tokenizer", field="checkpoint", folder=True),
    "janus": Kind(
        noun="a Janus",
        field="checkpoint",
        prefixes=(("gen_head.vision_head.", "model.generation_head.vision_head."),),
        folder=True,
        loader="Load Janus",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
    ),
    "bitdance": Kind(
        noun="a BitDance",
        field="checkpoint",
        # An ImageNet model; or the language model of a text model, whose other parts lie beside it.
        prefixes=(("head.net.ada_ln_blocks.", "model.layers.0.self_attn.q_norm."),),
        folder=True,
        loader="Load BitDance",
        decoder="bitdance-ae",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
        untested=True,
    ),
    "bitdance-fp8": Kind(
        noun="a part of a BitDance in fp8 for ComfyUI, without the configuration and the tokenizer",
        field="checkpoint",
        prefixes=(("diffusion_head.net.", "vision_head.net.", "net.ada_ln_blocks."), ("projector.fc1.", "fc1.")),
        remedy="choose the entry bitdance-14b-64x, and dtype fp8 or int8",
    ),
    "bitdance-head": Kind(
        noun="only the diffusion head of a BitDance",
        field="checkpoint",
        prefixes=("net.ada_ln_blocks.",),
        remedy="choose the folder with config.json and the shards of the language model",
    ),
    "bitdance-ae": Kind(
        noun="a binary autoencoder",
        field="decoder",
        prefixes=("decoder.adaptive.0.gamma.", "encoder.down."),
    ),
    "nextstep": Kind(
        noun="a NextStep",
        field="checkpoint",
        prefixes=("image_head.net.input_proj.", "image_in_projector.", "layers.0.self_attn.q_proj."),
        folder=True,
        loader="Load NextStep",
        decoder="nextstep-f8ch16",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
        untested=True,
    ),
    "vq": Kind(
        noun="a VQ autoencoder",
        field="decoder",
        prefixes=("quantize.embedding.weight",),
    ),
    "kl": Kind(
        noun="a KL autoencoder",
        field="decoder",
        prefixes=("post_quant_conv.weight", "decoder."),
    ),
    "latent-samplers": Kind(
        noun="latent samplers of MuLo-SD",
        field="latent_samplers",
        prefixes=("up_sampler.rise.", "down_sampler.read."),
        loader="Load Latent Samplers",
    ),
    # Last, because files of other kinds have these names, too. Flux's form of a KL autoencoder has no name of its own.
    "nextstep-ae": Kind(
        noun="an autoencoder of NextStep",
        field="decoder",
        prefixes=("encoder.down.0.block.", "encoder.mid.attn_1.q.", "decoder.up.0.block.", "decoder.mid.attn_1.q."),
        folder=True,
    ),
    # The second one is that of transformers' models with an image reader.
    "tar": Kind(
        noun="a Tar language model",
        field="checkpoint",
        prefixes=(("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),),
        folder=True,
        loader="Load Tar",
        checked=("bf16",),
        blocks=True,
        four_bits=True,
    ),
}


class Precision(NamedTuple):
    """A dtype that was chosen for a device."""

    compute: torch.dtype  # of the computation, and of the weights that are not quantised
    bits: str = ""  # weights in the blocks: a key of QUANTISED, "auto": as the file holds them, "": as ``compute``


def choose_dtype(name: str | Precision, device: str | torch.device, family: str) -> torch.dtype:
    """The compute dtype of a network of ``family``, a key of :data:`KINDS`, on a device.

    ``name`` is "fp32", "bf16", "fp16"; "auto": a 16-bit dtype in which the family was checked, where a GPU computes it
    at full speed, else fp32; a key of ``QUANTISED``: as "auto", and the loaders round the blocks, see
    :func:`choose_bits`; or what was chosen already. For a MAR "auto" is fp16, in which it was evaluated under autocast,
    not bf16: the first diffusion step multiplies a denoiser's rounding error by hundreds (316 at 100 diffusion steps),
    to 0.15 in fp16 and about 1 in bf16.

    Raises:
        UserError: for an unknown name, fp16 where it overflows, a network without blocks that can be quantised, or that
            was not measured in 4 bits, and fp8 on a device without it.
    """
    if isinstance(name, Precision):
        return name.compute

    kind = KINDS[family]
    device = torch.device(device)
    if name == "fp16" and kind.overflows:
        raise UserError(f"dtype: {kind.noun} computes numbers that are too large for fp16; choose bf16, fp32 or auto")
    if name == "fp16" and kind.untested:
        raise UserError(
            f"dtype: {kind.noun} was trained in bf16, and nobody has tested it in fp16; choose bf16, fp32 or auto"
        )
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]

    known = dtypes_of(kind)
    if name in FEWER_BITS and kind.blocks and name not in known:
        raise UserError(
            f"dtype: FastAR does not offer 4-bit weights for {kind.noun}, because nobody has measured how much they "
            f"change its images; choose {INT8}"
        )
    if name not in known:
        raise UserError(f"dtype: FastAR cannot load {kind.noun} in {name!r}; choose one of {', '.join(known)}")
    if name == FP8 and not holds_fp8(device):
        raise UserError(f"dtype: fp8 is not supported on {device}; choose {INT8}, which needs the same memory")

    fast = fast_halves(device)
    for half in kind.checked:
        if half in fast:
            return DTYPES[half]

    return torch.float32


def dtypes_of(kind: Kind) -> tuple[str, ...]:
    """The dtypes of a kind of files, as menus list them."""
    plain = [name for name in DTYPES if name != "fp16" or not (kind.overflows or kind.untested)]
    quantised = (EIGHT_BITS if kind.blocks else ()) + (FEWER_BITS if kind.four_bits else ())
    return (AUTO, *plain, *quantised)


def fast_halves(device: torch.device) -> tuple[str, ...]:
    """The 16-bit dtypes that a device computes faster than fp32."""
    if device.type in ("mps", "xpu"):
        return ("fp16",)
    if device.type != "cuda":
        return ()

    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return ("bf16", "fp16")

    # Before Volta fp16 is not faster than fp32, and on some cards much slower.
    return ("fp16",) if capability >= (7, 0) else ()


def choose_bits(name: str | Precision, device: str | torch.device) -> str:
    """How a network's blocks are quantised on a device by the name of its dtype, see :class:`Precision`."""
    if isinstance(name, Precision):
        return name.bits
    if name == AUTO:
        return AUTO if holds_fp8(torch.device(device)) else ""

    return name if name in QUANTISED else ""


def holds_fp8(device: torch.device) -> bool:
    """Whether a device can hold and convert fp8 numbers."""
    return device.type != "mps"


def identify(names: Iterable[str]) -> str:
    """Identify a family by parameter names: a key of :data:`KINDS`, or "unknown"."""
    held = list(names)

    def is_there(prefix: str | tuple[str, ...]) -> bool:
        return any(name.startswith(prefix) for name in held)

    for family, kind in KINDS.items():
        if kind.prefixes and all(map(is_there, kind.prefixes)):
            return family

    return "unknown"


def read(
    path: str | Path, family: str, skip: Callable[[str], bool] | None = None, weights: str = AUTO
) -> ck.Checkpoint:
    """Read a file of a family.

    Args:
        path: a weight file; where the family allows it also a model folder, one of its shards, or their index.
        family: a key of :data:`KINDS`.
        skip: whether a weight of this name is left out.
        weights: "ema", "trained" or "auto", see :func:`.checkpoint.read`.

    Raises:
        UserError: as :func:`.checkpoint.read`; if the file holds another family, with the input or node that accepts
            it; if its weights are quantised or a LoRA; or if it does not hold the wanted kind of weights.
    """
    expected = KINDS[family]
    path = Path(path)
    shards = weight_files(path, expected.field, expected.noun) if expected.folder else [path]
    whole = path if shards == [path] else shards[0].parent

    file = replace(ck.read(whole, expected.field, skip, shards, weights), what=expected.noun)
    file, found = identified(file, family, weights)
    if found == family:
        _expect_weights(file, weights)
        return file.filter(lambda name: not (skip and skip(name)))

    if found == "unknown":
        tops = {".".join(name.split(".")[:2]) for name in file.state}
        raise file.error(
            f"does not hold {expected.noun}; the names of its parameters begin with {listed(tops)}",
            f"choose a file with {expected.noun} whose parameters have the authors' names",
        )

    kind = KINDS[found]
    if kind.remedy:
        remedy = kind.remedy
    elif kind.loader:
        remedy = f"load it with {kind.loader}"
    elif kind.field == expected.field:
        remedy = "choose a different file"
    else:
        remedy = f"choose it in {kind.input}"
    raise file.error(f"holds {kind.noun}, not {expected.noun}", remedy)


def identified(file: ck.Checkpoint, wanted: str = "", weights: str = AUTO) -> tuple[ck.Checkpoint, str]:
    """The network in a file under its own names, and its family, a key of :data:`KINDS` or "unknown".

    In a training's file a prefix stands in front of all names of the network ("model.", "model.diffusion_model."), and
    other networks may lie beside it. ``wanted`` is the family that is looked for, "" for any.
    """
    found = identify(file.state)
    if packed := packed_format(file.state, file.metadata):
        named = [found, *_inside(file.state).values()]
        if not any(KINDS[name].remedy for name in named if name in KINDS):  # what has its own remedy is refused later
            raise file.error(*packed)

    if found != "unknown":
        return file, found

    inside = _inside(file.state)
    prefixes = [prefix for prefix, family in inside.items() if family == (wanted or family)] or list(inside)
    if not prefixes:
        return file, found

    averaged = [prefix for prefix in prefixes if is_averaged(prefix)]
    trained = [prefix for prefix in prefixes if prefix not in averaged]
    chosen = averaged if averaged and (weights != TRAINED or not trained) else trained
    if len(chosen) > 1:
        raise file.error(
            f"holds several networks of one kind ({listed(chosen)})",
            "save the weights of one of these networks in a file of its own",
        )
    if averaged and trained and weights == AUTO:
        file.assume("FastAR uses the averaged (EMA) weights; the file also holds the trained weights")

    prefix = chosen[0]
    state = {name.removeprefix(prefix): tensor for name, tensor in file.state.items() if name.startswith(prefix)}
    network = replace(file, state=state, averaged=file.averaged or is_averaged(prefix))
    return network, inside[prefix]


def _inside(state: Mapping[str, Any]) -> dict[str, str]:
    """Prefix of the names of each network in a file, to its family; no network is within another."""
    beginnings: list[str] = []
    for kind in KINDS.values():
        if kind.prefixes:
            first = kind.prefixes[0]
            beginnings += [first] if isinstance(first, str) else first

    prefixes = set()
    for name in state:
        for beginning in beginnings:
            at = name.find(f".{beginning}")
            if at >= 0:
                prefixes.add(name[: at + 1])

    found: dict[str, str] = {}
    for prefix in sorted(prefixes, key=len)[:_MOST_PREFIXES]:
        if any(prefix.startswith(outer) for outer in found):
            continue

        family = identify(name.removeprefix(prefix) for name in state if name.startswith(prefix))
        if family != "unknown":
            found[prefix] = family

    return found


def _expect_weights(file: ck.Checkpoint, weights: str) -> None:
    """Raise a UserError if the file has not the wanted one of trained and averaged weights."""
    if weights == EMA and not file.averaged:
        raise UserError(f"weights: {file.path.name} does not hold averaged (EMA) weights; choose {AUTO}")
    if weights == TRAINED and file.averaged:
        raise UserError(f"weights: {file.path.name} holds averaged (EMA) weights only; choose {AUTO}")
