"""Text to what LlamaGen's text-to-image models draw from: features of the flan-t5-xl encoder.

The network and its tokenizer come from ``transformers``, which ComfyUI installs for itself; it is imported when an encoder
is loaded, never before. Sources: Raffel et al. 2020 (T5, arXiv 1910.10683), Chung et al. 2022 (Flan-T5, arXiv 2210.11416),
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
from .folders import weight_files

# What the models were trained with: longer captions end here. The end mark counts.
MAX_TOKENS = 120
FIELD = "encoder"
_ATTENTION = "encoder.block.0.layer.0.SelfAttention"
_FEED_FORWARD = "encoder.block.0.layer.1.DenseReluDense"
_SHARED, _COPY = "shared.weight", "encoder.embed_tokens.weight"
_TOKENIZERS = ("tokenizer.json", "spiece.model")


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A T5 encoder with its tokenizer.

    Attributes:
        net: transformers' ``T5EncoderModel`` in eval mode, without gradients.
        tokenizer: transformers' T5 tokenizer.
        name: what a person calls it.
    """

    net: nn.Module
    tokenizer: Any
    name: str

    @property
    def width(self) -> int:
        """Width of a feature row: 2048 for flan-t5-xl."""
        return int(self.net.config.d_model)  # type: ignore[union-attr, arg-type]

    def tokens(self, text: str) -> list[int]:
        """Token ids of a prompt after cleaning, at most 120; the last is the end mark, so there is at least one."""
        ids = self.tokenizer(clean(text), max_length=MAX_TOKENS, truncation=True, add_special_tokens=True)
        return list(ids["input_ids"])

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Features of prompts, one entry an image.

        Every prompt is encoded alone, so that an image does not depend on its neighbours in the batch. Nothing is padded:
        a LlamaGen does not see padding (its prefix has no positions), and pads from the left only to share a batch.

        Args:
            texts: prompts as typed.

        Returns:
            For each, the last hidden state of its n tokens [n, width], 1 <= n <= 120, in the network's dtype and on its
            device. Equal prompts share one tensor.
        """
        device = next(self.net.parameters()).device
        known: dict[str, Tensor] = {}
        for text in texts:
            if text not in known:
                ids = torch.tensor([self.tokens(text)], device=device)
                out = self.net(input_ids=ids, attention_mask=torch.ones_like(ids))
                known[text] = out.last_hidden_state[0]
        return [known[text] for text in texts]


def choose_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """The dtype the encoder computes in: bf16 where CUDA hardware has it, else fp32, for "auto".

    Raises:
        UserError: no such name, or fp16, in which T5's activations overflow.
    """
    if name == "fp16":
        raise UserError("dtype: a T5 encoder overflows in fp16; choose bf16, fp32 or auto")
    compute = ck.choose_dtype(name, device, bf16=True)
    return torch.float32 if compute == torch.float16 else compute


def load_text_encoder(
    path: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", tokenizer: str | Path | None = None
) -> TextEncoder:
    """Load a T5 encoder of any size.

    The shape follows from the weights; nothing in the folder is run, and a decoder that is there is passed over.

    Args:
        path: a folder as Hugging Face lays it out (one weight file or numbered pieces, safetensors preferred, and the
            tokenizer), one of such pieces, or a single weight file.
        dtype: "auto", "fp32" or "bf16", see :func:`choose_dtype`.
        device: where the weights go.
        tokenizer: folder with ``tokenizer.json`` or ``spiece.model``; None looks beside the weights. All T5 and Flan-T5
            sizes have the same one.

    Raises:
        UserError: transformers is missing, or a file is missing, damaged, of another network, or incomplete.
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
    ck.load_strictly(net, file.state, path, "a T5 encoder", dtype=compute, device=device, field=FIELD)
    net.encoder.embed_tokens.weight = net.shared.weight  # type: ignore[union-attr]
    if len(words) > net.shared.num_embeddings:  # type: ignore[union-attr, operator]
        raise file.complain(
            f"knows {net.shared.num_embeddings} tokens and its tokenizer makes {len(words)}",  # type: ignore[union-attr]
            "put the tokenizer of the same model beside it",
        )
    return TextEncoder(
        net.eval().requires_grad_(False), words, path.stem if path.suffix == ".safetensors" else path.name
    )


def _transformers() -> Any:
    try:
        import transformers

        for part in ("T5Config", "T5EncoderModel", "T5TokenizerFast"):
            getattr(transformers, part)  # parts are imported when they are named, and fail then
    except (ImportError, RuntimeError) as e:
        raise UserError(
            f"{FIELD}: reading a prompt needs the Python package transformers, which ComfyUI brings, and here it cannot be "
            f"imported ({_first_line(e)}); install it with: pip install transformers"
        ) from e
    return transformers


def has_tokenizer(path: str | Path) -> bool:
    """Whether a T5 tokenizer lies in a folder, or beside a file."""
    folder = Path(path)
    folder = folder if folder.is_dir() else folder.parent
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _tokenizer(t5: Any, folder: Path) -> Any:
    if not has_tokenizer(folder):
        raise UserError(
            f"{FIELD}: {folder} has no tokenizer ({' or '.join(_TOKENIZERS)}); put the one of google/flan-t5-xl there"
        )
    try:
        return t5.T5TokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as e:  # a damaged tokenizer can fail in any way
        raise UserError(
            f"{FIELD}: the tokenizer in {folder} cannot be read ({_first_line(e)}); get its files again"
        ) from e


def _read(path: Path, files: Sequence[Path]) -> ck.Checkpoint:
    """The encoder's weights in the files of ``path``."""
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(ck.read(file, FIELD).state)
    ck.expect(ck.Checkpoint(state, {}, path, FIELD), "t5")
    state = {name: t for name, t in state.items() if not name.startswith(("decoder.", "lm_head."))}
    # The two names of one matrix; files have either or both.
    if _SHARED in state or _COPY in state:
        state[_SHARED] = state[_COPY] = state.get(_SHARED, state.get(_COPY))  # type: ignore[assignment]
    return ck.Checkpoint(state, {}, path, FIELD)


def _network(t5: Any, file: ck.Checkpoint) -> Any:
    state = file.state
    try:
        buckets, heads = state[f"{_ATTENTION}.relative_attention_bias.weight"].shape
        inner, width = state[f"{_ATTENTION}.q.weight"].shape
        gated = f"{_FEED_FORWARD}.wi_0.weight" in state
        config = t5.T5Config(
            vocab_size=state[_SHARED].shape[0],
            d_model=width,
            d_kv=inner // heads,
            num_heads=heads,
            d_ff=state[f"{_FEED_FORWARD}.{'wi_0' if gated else 'wi'}.weight"].shape[0],
            num_layers=len({name.split(".")[2] for name in state if name.startswith("encoder.block.")}),
            relative_attention_num_buckets=buckets,
            feed_forward_proj="gated-gelu" if gated else "relu",
            is_encoder_decoder=False,
            use_cache=False,
            dropout_rate=0.0,
        )
        with torch.device("meta"):
            return t5.T5EncoderModel(config)
    except KeyError as e:
        raise file.complain(f"does not fit a T5 encoder: {e.args[0]} is missing") from e
    except (ValueError, IndexError, ZeroDivisionError, RuntimeError) as e:
        raise file.complain(f"does not fit a T5 encoder ({_first_line(e)})") from e


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:160]
