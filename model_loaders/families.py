"""Identification of the model family of a checkpoint by its parameter names."""

from __future__ import annotations

from collections.abc import Mapping

from .checkpoint import Checkpoint, printable

_WORDS = {
    "mar": "a MAR",
    "kl": "a KL autoencoder",
    "vq": "a VQ autoencoder",
    "llamagen": "a LlamaGen",
    "t5": "a T5 text encoder",
    "tar language model": "a language model",
    "ta-tok": "a TA-Tok",
    "dtok": "a Tar de-tokenizer",
    "hybrid": "a Harmon or UniPic",
}
# Remedy for a file of another family: (family found, family expected).
_PLACES = {
    ("mar", "kl"): "choose it as checkpoint",
    ("kl", "mar"): "choose it as decoder",
    ("llamagen", "vq"): "choose it as checkpoint",
    ("vq", "llamagen"): "choose it as decoder",
    ("vq", "dtok"): "choose it as decoder",
    ("dtok", "vq"): "choose it as checkpoint",
    ("ta-tok", "dtok"): "choose it as ta_tok",
    ("dtok", "ta-tok"): "choose it as checkpoint",
    ("dtok", "llamagen"): "load it with Load Tar De-tokenizer",
    ("llamagen", "dtok"): "load it with Load LlamaGen / PAR",
    ("dtok", "tar language model"): "load it with Load Tar De-tokenizer",
    ("tar language model", "dtok"): "load it with Load Tar",
    ("hybrid", "mar"): "load it with Load Harmon / UniPic",
    ("hybrid", "tar language model"): "load it with Load Harmon / UniPic",
    ("mar", "hybrid"): "load it with Load MAR",
    ("tar language model", "hybrid"): "load it with Load Tar",
    ("kl", "hybrid"): "choose it as decoder",
    ("hybrid", "kl"): "choose it as checkpoint",
}
_ANOTHER = "choose another file"


def identify(state: Mapping[str, object]) -> str:
    """Identify a model family by parameter names.

    Returns:
        "mar", "hybrid", "kl", "vq", "llamagen", "dtok", "ta-tok", "t5", "tar language model" or "unknown".
    """
    if "mar.fake_latent" in state and "llm.model.embed_tokens.weight" in state:
        return "hybrid"
    if any(name.startswith("diffloss.net.") for name in state):
        return "mar"
    if "quantize.embedding.weight" in state:
        return "vq"
    if "post_quant_conv.weight" in state and any(name.startswith("decoder.") for name in state):
        return "kl"
    if "tok_embeddings.weight" in state and any(name.startswith("cls_embedding.") for name in state):
        return "llamagen"
    if "tok_embeddings.weight" in state and any(name.startswith("clip_proj.") for name in state):
        return "dtok"
    if any(name.startswith("bottleneck.regularizer.") for name in state):
        return "ta-tok"
    if any(name.startswith("encoder.block.0.layer.0.SelfAttention.") for name in state):
        return "t5"
    if any(name.endswith("embed_tokens.weight") for name in state):
        return "tar language model"
    return "unknown"


def expect(checkpoint: Checkpoint, family: str) -> None:
    """Check that a file holds ``family``, one of the return values of :func:`identify`.

    Raises:
        UserError: it holds another family; the message names it and the input or node that accepts it.
    """
    found = identify(checkpoint.state)
    if found == family:
        return
    if found == "unknown":
        names = ", ".join(printable(name) for name in sorted(checkpoint.state)[:3])
        raise checkpoint.error(f"holds no weights of {_WORDS[family]} (but {names})", _ANOTHER)
    raise checkpoint.error(f"holds {_WORDS[found]}, not {_WORDS[family]}", _PLACES.get((found, family), _ANOTHER))
