"""T5 text encoder, which computes the condition of LlamaGen's text-to-image models (flan-t5-xl).

The network and its tokenizer are those of ``transformers``, a requirement of ComfyUI; it is imported when an encoder is
loaded. Sources: Raffel et al. 2020 (T5, arXiv 1910.10683), Chung et al. 2022 (Flan-T5, arXiv 2210.11416),
Sun et al. 2024 (LlamaGen, arXiv 2406.06525) for cleaning, length and features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from . import checkpoint as ck
from .captions import clean
from .families import expect
from .folders import MAX_JSON_BYTES, member, read_json, weight_files
from .networks.structure import depth
from .tokenizer import check_components, import_error, library_errors

# Caption length in training, including the end-of-sequence token; longer prompts are truncated.
MAX_TOKENS = 120
FIELD = "encoder"
_ATTENTION = "encoder.block.0.layer.0.SelfAttention"
_FEED_FORWARD = "encoder.block.0.layer.1.DenseReluDense"
_SHARED, _COPY = "shared.weight", "encoder.embed_tokens.weight"
_TOKENIZERS = ("tokenizer.json", "spiece.model")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Components of the tokenizers of all T5 and Flan-T5, as written by different versions of transformers.
_COMPONENTS: dict[str, dict[str | None, dict[str, Any]]] = {
    "model": {"Unigram": {"vocab": ..., "unk_id": ..., "byte_fallback": (True,)}},
    "normalizer": {
        None: {},
        "Precompiled": {"precompiled_charsmap": ...},
        "Strip": {"strip_left": (True,), "strip_right": (True,)},
        "Replace": {"pattern": ({"Regex": " {2,}"},), "content": ("\u2581", " ")},
    },
    "pre_tokenizer": {
        None: {},
        "WhitespaceSplit": {},
        "Metaspace": {
            "replacement": ("\u2581",),
            "add_prefix_space": (True,),
            "prepend_scheme": ("always", "first", "never"),
            "split": (True,),
            "str_rep": ("\u2581",),
        },
    },
}


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A T5 encoder with its tokenizer.

    Attributes:
        net: transformers' ``T5EncoderModel`` in eval mode, without gradients.
        tokenizer: transformers' T5 tokenizer.
        name: display name.
    """

    net: nn.Module
    tokenizer: Any
    name: str

    @property
    def width(self) -> int:
        """Channels per token of the features: 2048 for flan-t5-xl."""
        return int(self.net.config.d_model)  # type: ignore[union-attr, arg-type]

    def tokens(self, text: str) -> list[int]:
        """Token ids of a cleaned prompt: 1 to 120, the last is the end-of-sequence token."""
        ids = self.tokenizer(clean(text), max_length=MAX_TOKENS, truncation=True, add_special_tokens=True)
        return list(ids["input_ids"])

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Features of prompts, one entry per image.

        Prompts are encoded one by one and without padding, so that an image does not depend on the rest of the batch.
        LlamaGen masks padding, and its prefix has no positions.

        Args:
            texts: prompts before cleaning.

        Returns:
            For each prompt the last hidden state [n, width] of its n tokens, 1 <= n <= 120, in the network's dtype and on
            its device. Equal prompts share one tensor.
        """
        device = next(self.net.parameters()).device
        features: dict[str, Tensor] = {}
        for text in texts:
            if text not in features:
                ids = torch.tensor([self.tokens(text)], device=device)
                out = self.net(input_ids=ids, attention_mask=torch.ones_like(ids))
                features[text] = out.last_hidden_state[0]
        return [features[text] for text in texts]


def choose_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """Resolve the encoder's compute dtype; "auto" is bf16 where CUDA hardware supports it, else fp32.

    Raises:
        UserError: unknown name, or fp16, in which T5's activations overflow.
    """
    if name == "fp16":
        raise UserError("dtype: a T5 encoder overflows in fp16; choose bf16, fp32 or auto")
    compute = ck.choose_dtype(name, device, bf16=True)
    return torch.float32 if compute == torch.float16 else compute


def load_text_encoder(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", tokenizer: str | Path | None = None
) -> TextEncoder:
    """Load a T5 encoder of any size.

    The shape is derived from the weights. No code from the folder is executed, and decoder weights are ignored.

    Args:
        path: a Hugging Face model folder (one weight file or shards, safetensors preferred, and the tokenizer), one of its
            shards, or a single weight file.
        dtype: "auto", "fp32" or "bf16", see :func:`choose_dtype`.
        device: device of the weights.
        tokenizer: folder with ``tokenizer.json`` or ``spiece.model``; None for the folder of the weights. All T5 and
            Flan-T5 sizes share one tokenizer.

    Returns:
        The encoder in eval mode, without gradients.

    Raises:
        UserError: transformers is missing, or a file is missing, damaged, incomplete or of another network.
    """
    compute = choose_dtype(dtype, device)
    t5 = _transformers()
    path = Path(path)
    files = weight_files(path, FIELD, "a T5 encoder")
    if len(files) > 1:
        path = files[0].parent
    words = _tokenizer(t5, Path(tokenizer) if tokenizer else files[0].parent)
    file = _read(path, files)
    net = _network(t5, file)
    ck.load_strictly(net, file, "a T5 encoder", dtype=compute, device=device)
    net.encoder.embed_tokens.weight = net.shared.weight  # type: ignore[union-attr]
    if len(words) > net.shared.num_embeddings:  # type: ignore[union-attr, operator]
        raise file.error(
            f"has {net.shared.num_embeddings} tokens and its tokenizer {len(words)}",  # type: ignore[union-attr]
            "put the tokenizer of the same model in its folder",
        )
    return TextEncoder(net, words, path.stem if path.suffix == ".safetensors" else path.name)


def _transformers() -> Any:
    try:
        import transformers

        for part in ("T5Config", "T5EncoderModel", "T5TokenizerFast"):
            getattr(transformers, part)  # imported lazily, so a failure shows only here
    except (ImportError, RuntimeError) as e:
        raise import_error("transformers", FIELD, e) from e
    return transformers


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder, or the folder of a file, contains a T5 tokenizer."""
    folder = Path(path)
    folder = folder if folder.is_dir() else folder.parent
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _tokenizer(t5: Any, folder: Path) -> Any:
    if not has_tokenizer(folder):
        raise UserError(
            f"{FIELD}: {folder} has no tokenizer ({' or '.join(_TOKENIZERS)}); put the one of google/flan-t5-xl there"
        )
    for name in (*_TOKENIZERS, *_TOKENIZER_SETTINGS):
        path = folder / name
        if path.is_file() and member(path, FIELD).stat().st_size > MAX_JSON_BYTES:
            raise UserError(f"{FIELD}: {name} in {folder} is too large; get the file again")
    settings = read_json(folder / "tokenizer_config.json", FIELD)
    # The official file has an unused special_tokens_map_file.
    if any(settings.get(name) for name in ("tokenizer_file", "vocab_file")):
        raise UserError(
            f"{FIELD}: tokenizer_config.json in {folder} refers to another file; put the one of google/flan-t5-xl there"
        )
    if spec := read_json(folder / "tokenizer.json", FIELD):
        check_components(spec, _COMPONENTS, f"tokenizer.json in {folder}", FIELD)
    with library_errors(f"{FIELD}: the tokenizer in {folder} cannot be read"):
        words = t5.T5TokenizerFast.from_pretrained(str(folder), local_files_only=True)
        words("a small red boat")
    return words


def _read(path: Path, files: Sequence[Path]) -> ck.Checkpoint:
    """Read the encoder's weights.

    Raises:
        UserError: see :func:`.checkpoint.read`, or the files are not those of a T5 encoder.
    """
    state: dict[str, Tensor] = {}
    for shard in files:
        state.update(ck.read(shard, FIELD).state)
    file = ck.Checkpoint(state, {}, path, FIELD)
    expect(file, "t5")
    file = file.filter(lambda name: not name.startswith(("decoder.", "lm_head.")))
    state = file.state
    # Two names of the same matrix; files have either or both.
    if _SHARED in state or _COPY in state:
        state[_SHARED] = state[_COPY] = state.get(_SHARED, state.get(_COPY))  # type: ignore[assignment]
    return file


def _network(t5: Any, file: ck.Checkpoint) -> Any:
    """Construct the encoder on the meta device.

    Raises:
        UserError: no shape follows from the weights.
    """
    state = file.state
    with ck.shape_errors(file, "a T5 encoder"):
        buckets, heads = state[f"{_ATTENTION}.relative_attention_bias.weight"].shape
        inner, width = state[f"{_ATTENTION}.q.weight"].shape
        gated = f"{_FEED_FORWARD}.wi_0.weight" in state
        config = t5.T5Config(
            vocab_size=state[_SHARED].shape[0],
            d_model=width,
            d_kv=inner // heads,
            num_heads=heads,
            d_ff=state[f"{_FEED_FORWARD}.{'wi_0' if gated else 'wi'}.weight"].shape[0],
            num_layers=depth(state, "encoder.block."),
            relative_attention_num_buckets=buckets,
            feed_forward_proj="gated-gelu" if gated else "relu",
            is_encoder_decoder=False,
            use_cache=False,
            dropout_rate=0.0,
        )
        return ck.build(file, "a T5 encoder", lambda: t5.T5EncoderModel(config))
