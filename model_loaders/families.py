"""The families of weight files: where they are chosen, how their parameter names identify them, and reading one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from . import checkpoint as ck


class Kind(NamedTuple):
    """A family of files."""

    noun: str  # what messages call a file of the family
    field: str  # the input that selects its files; messages begin with it
    # Beginnings of parameter names that a file of the family has, each at least once (of a tuple any); () if it is not identified.
    prefixes: tuple[str | tuple[str, ...], ...] = ()
    folder: bool = False  # whether it may be a model folder
    loader: str = ""  # the node that loads it, if it has one of its own
    decoder: str = ""  # catalogue id of its official decoder


_JANUS = ("gen_head.vision_head.", "model.generation_head.vision_head.")
_HYBRID = ("mar.fake_latent", "llm.model.embed_tokens.")
_LLAMAGEN, _DTOK = ("tok_embeddings.weight", "cls_embedding."), ("tok_embeddings.weight", "clip_proj.")
# In order of identification: a file is of the first family whose prefixes are all there.
KINDS = {
    "janusflow": Kind("a JanusFlow, which draws by another method", "checkpoint", ("vision_gen_",)),
    "janus": Kind("a Janus", "checkpoint", (_JANUS,), folder=True, loader="Load Janus"),
    "hybrid": Kind(
        "a Harmon or UniPic", "checkpoint", _HYBRID, folder=True, loader="Load Harmon / UniPic", decoder="kl16"
    ),
    "mar": Kind("a MAR", "checkpoint", ("diffloss.net.",), loader="Load MAR", decoder="kl16"),
    "vq": Kind("a VQ autoencoder", "decoder", ("quantize.embedding.weight",)),
    "kl": Kind("a KL autoencoder", "decoder", ("post_quant_conv.weight", "decoder.")),
    "llamagen": Kind("a LlamaGen", "checkpoint", _LLAMAGEN, loader="Load LlamaGen / PAR", decoder="vq16-c2i"),
    "dtok": Kind("a Tar de-tokenizer", "checkpoint", _DTOK, loader="Load Tar De-tokenizer", decoder="vq16-t2i"),
    "ta-tok": Kind("a TA-Tok", "ta_tok", ("bottleneck.regularizer.",)),
    "t5": Kind("a T5 text encoder", "encoder", ("encoder.block.0.layer.0.SelfAttention.",), folder=True),
    "tar": Kind("a Tar language model", "checkpoint", ("model.embed_tokens.weight",), folder=True, loader="Load Tar"),
    "tokenizer": Kind("a tokenizer", "checkpoint", folder=True),
}


def identify(names: Iterable[str]) -> str:
    """Identify a family by parameter names: a key of :data:`KINDS`, or "unknown"."""
    held = list(names)
    for family, kind in KINDS.items():
        if kind.prefixes and all(any(name.startswith(prefix) for name in held) for prefix in kind.prefixes):
            return family
    return "unknown"


def read(path: str | Path, family: str, skip: Callable[[str], bool] | None = None) -> ck.Checkpoint:
    """Read a file of ``family``, a key of :data:`KINDS`, or where the family allows it a model folder or one of its shards.

    A UserError as of :func:`.checkpoint.read`, or if it holds another family, with the input or node that accepts it.
    """
    expected, path = KINDS[family], Path(path)
    shards = ck.weight_files(path, expected.field, expected.noun) if expected.folder else [path]
    whole = path if shards == [path] else shards[0].parent
    file = replace(ck.read(whole, expected.field, skip, shards), what=expected.noun)
    found = identify(file.state)
    if found == family:
        return file
    if found == "unknown":
        names = ", ".join(name[:80] for name in sorted(file.state)[:3])
        raise file.error(f"holds no weights of {expected.noun} (but {names})", "choose another file")
    kind = KINDS[found]
    elsewhere = "choose another file" if kind.field == expected.field else f"choose it as {kind.field}"
    remedy = f"load it with {kind.loader}" if kind.loader else elsewhere
    raise file.error(f"holds {kind.noun}, not {expected.noun}", remedy)
