"""The families of weight files: where they are chosen, and how their parameter names identify them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .checkpoint import Checkpoint


class Kind(NamedTuple):
    """A family of files.

    Attributes:
        noun: what messages call a file of the family.
        field: the input that selects its files; messages begin with it.
        prefixes: beginnings of parameter names that a file of the family has, each at least once (of a tuple any); () if it is not
            identified.
        folder: whether it may be a model folder.
        loader: the node that loads it, if it has one of its own.
    """

    noun: str
    field: str
    prefixes: tuple[str | tuple[str, ...], ...] = ()
    folder: bool = False
    loader: str = ""


# In order of identification: a file is of the first family whose prefixes are all there.
KINDS = {
    "janus": Kind(
        "a Janus",
        "checkpoint",
        (("gen_head.vision_head.", "model.generation_head.vision_head."),),
        folder=True,
        loader="Load Janus",
    ),
    "hybrid": Kind(
        "a Harmon or UniPic",
        "checkpoint",
        ("mar.fake_latent", "llm.model.embed_tokens."),
        folder=True,
        loader="Load Harmon / UniPic",
    ),
    "mar": Kind("a MAR", "checkpoint", ("diffloss.net.",), loader="Load MAR"),
    "vq": Kind("a VQ autoencoder", "decoder", ("quantize.embedding.weight",)),
    "kl": Kind("a KL autoencoder", "decoder", ("post_quant_conv.weight", "decoder.")),
    "llamagen": Kind(
        "a LlamaGen", "checkpoint", ("tok_embeddings.weight", "cls_embedding."), loader="Load LlamaGen / PAR"
    ),
    "dtok": Kind(
        "a Tar de-tokenizer", "checkpoint", ("tok_embeddings.weight", "clip_proj."), loader="Load Tar De-tokenizer"
    ),
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


def expect(checkpoint: Checkpoint, family: str) -> None:
    """Check that a file holds ``family``, a key of :data:`KINDS`.

    Raises:
        UserError: it holds another family; the message names it and the input or node that accepts it.
    """
    found, expected = identify(checkpoint.state), KINDS[family]
    if found == family:
        return
    if found == "unknown":
        names = ", ".join(name[:80] for name in sorted(checkpoint.state)[:3])
        raise checkpoint.error(f"holds no weights of {expected.noun} (but {names})", "choose another file")
    kind = KINDS[found]
    elsewhere = "choose another file" if kind.field == expected.field else f"choose it as {kind.field}"
    remedy = f"load it with {kind.loader}" if kind.loader else elsewhere
    raise checkpoint.error(f"holds {kind.noun}, not {expected.noun}", remedy)
