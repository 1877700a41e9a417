"""T5 text encoder, which computes the condition of LlamaGen's text-to-image models (flan-t5-xl).

The network is that of ``transformers``; it is imported when an encoder is loaded. Its ``from_pretrained`` is not used:
it reads folders only, and pickles without the checks of ``archive``. Sources: Raffel et al. 2020 (T5, arXiv
1910.10683), Chung et al. 2022 (Flan-T5, arXiv 2210.11416), Sun et al. 2024 (LlamaGen, arXiv 2406.06525) for cleaning,
length and features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import not_finite
from ...networks.chat import checked, expect_text
from ...networks.precision import is_finite
from ...networks.structure import depth
from ...networks.torch_state import in_own_state
from ..files import checkpoint as ck
from ..files.configs import expect_fixed, expect_stated
from ..files.tokenizer import Tokenizer, import_error, load_tokenizer
from ..kinds import KINDS, choose_dtype, read
from .captions import clean

# Caption length in training, including the end-of-sequence token; longer prompts are truncated.
MAX_TOKENS = 120
# Fields of a configuration: numbers that the network takes from it, numbers that the weights prove, and the functions
# that the two kinds of the feed-forward part have; see :mod:`.configs`.
READ: dict[str, tuple[float, float]] = {
    "layer_norm_epsilon": (0.0, 1.0),
    "relative_attention_max_distance": (1, 1 << 20),
}
PROVED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers", "relative_attention_num_buckets")
GATED = {"feed_forward_proj": ("gated-gelu",), "dense_act_fn": ("gelu_new",), "is_gated_act": (True,)}
PLAIN = {"feed_forward_proj": ("relu",), "dense_act_fn": ("relu",), "is_gated_act": (False,)}
_NAMES = ("", "model", "pytorch_model")  # of files in a model folder
_END = "</s>"
_LAYER = "encoder.block.0.layer"
# Two names of the same matrix.
_SHARED = "shared.weight"
_COPY = "encoder.embed_tokens.weight"


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A T5 encoder with its tokenizer."""

    net: nn.Module  # transformers' T5EncoderModel in eval mode, without gradients
    tokenizer: Tokenizer  # has the end-of-sequence token
    name: str  # display name

    @property
    def width(self) -> int:
        """Channels per token of the features: 2048 for flan-t5-xl."""
        return int(self.net.config.d_model)  # type: ignore[union-attr, arg-type]

    def tokens(self, text: str) -> list[int]:
        """Token ids of a cleaned prompt: 1 to 120, the last is the end-of-sequence token.

        Raises:
            UserError: for more than 20,000 characters, or an id outside the vocabulary.
        """
        expect_text(text)
        ids = self.tokenizer.encode(clean(text))[: MAX_TOKENS - 1]

        rows = int(self.net.config.vocab_size)  # type: ignore[union-attr, arg-type]
        return checked([*ids, self.tokenizer.special_tokens[_END]], rows, MAX_TOKENS, self.name)

    @in_own_state
    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Features of prompts before cleaning: for each the last hidden state [n, width] of its 1 to 120 tokens.

        Prompts are encoded one by one and without padding, so that an image does not depend on the rest of the batch.
        Equal prompts share one tensor, in the network's dtype and on its device.
        """
        device = next(self.net.parameters()).device

        features = {}
        for text in dict.fromkeys(texts):
            ids = torch.tensor([self.tokens(text)], device=device)
            features[text] = self.net(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            if not is_finite(features[text]):
                raise not_finite("encoder", self.name, "features")

        return [features[text] for text in texts]


def _shape(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of T5Config that the weights prove, without dropout."""
    rows, width = state[_SHARED].shape
    buckets, heads = state[f"{_LAYER}.0.SelfAttention.relative_attention_bias.weight"].shape
    gated = f"{_LAYER}.1.DenseReluDense.wi_0.weight" in state
    feed_forward = state[f"{_LAYER}.1.DenseReluDense.{'wi_0' if gated else 'wi'}.weight"]
    return {
        "vocab_size": rows,
        "d_model": width,
        "d_kv": len(state[f"{_LAYER}.0.SelfAttention.q.weight"]) // heads,
        "num_heads": heads,
        "d_ff": len(feed_forward),
        "num_layers": depth(state, "encoder.block."),
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "dropout_rate": 0.0,
    }


def _stated(file: ck.Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of T5Config that a configuration states."""
    stated = {}
    for name, (low, high) in READ.items():
        value = file.number(name, None, low, high, settings)
        if value is not None:
            stated[name] = value

    return stated


@in_own_state
def load_text_encoder(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", tokenizer: str | Path | None = None
) -> TextEncoder:
    """Load a T5 encoder of any size; decoder weights are ignored.

    A model folder's ``config.json`` may state the norm epsilon and the largest distance of the relative positions, and
    is checked. Shared arguments and errors: see :mod:`.checkpoint`.

    ``path`` is a Hugging Face model folder, one of its shards, or a single weight file; ``tokenizer`` a folder with
    ``tokenizer.json``, which all sizes share, None for that of the weights.

    Raises:
        UserError: also if transformers or tokenizers is missing.
    """
    compute = choose_dtype(dtype, device, "t5")
    try:
        from transformers import T5Config, T5EncoderModel
    except (ImportError, RuntimeError) as e:
        raise import_error("transformers", KINDS["t5"].field, e) from e

    file = read(path, "t5", lambda name: name.startswith(("decoder.", "lm_head.")))
    # Single files of many encoders share a folder, in which a configuration may be that of another one.
    settings = file.settings("config", beside=file.stem in _NAMES)

    words = load_tokenizer(Path(tokenizer) if tokenizer else file.folder, "", {}, file.field)
    with ck.misfits(file):
        # Files have either of the two names or both.
        matrix = file.state[_SHARED if _SHARED in file.state else _COPY]
        file.state[_SHARED] = matrix
        file.state[_COPY] = matrix
        config = T5Config(**_shape(file.state), is_encoder_decoder=False, use_cache=False, **_stated(file, settings))

    expect_stated(file, settings, {name: getattr(config, name) for name in PROVED})
    expect_fixed(file, settings, GATED if config.is_gated_act else PLAIN)

    rows = config.vocab_size
    if _END not in words.special_tokens:
        raise file.error(
            f"needs the token {_END}, but its tokenizer lacks this token",
            "replace the tokenizer with the one that belongs to this model",
        )
    if max(words.size, words.special_tokens[_END] + 1) > rows:
        raise file.error(
            f"has {rows} tokens, but its tokenizer has {words.size}",
            "replace the tokenizer with the one that belongs to this model",
        )

    net: Any = ck.load_strictly(file, lambda operations: T5EncoderModel(config), dtype=compute, device=device)
    net.encoder.embed_tokens.weight = net.shared.weight
    return TextEncoder(net, words, file.name)
