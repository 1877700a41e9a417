"""Tiny files of Tar in the official layouts, for tests of loading and of prompts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fastar_nodes.lab.training import captions
from fastar_nodes.networks.llama import Llama, LlamaConfig
from fastar_nodes.networks.ta_tok import TATok, TATokConfig
from qwen_reference import tiny_qwen
from safetensors.torch import save_file

WORDS = ["[UNK]", "a", "red", "blue", "boat", "cat", "at", "sunset", "the", "moon", ".", "!", "user", "assistant"]
SCALES, CODES = ({f"<{letter}{i}>": first + i for i in range(n)} for letter, first, n in (("S", 16, 3), ("I", 20, 20)))
ADDED = {"<im_start>": 15, "<im_end>": 14, **SCALES, **CODES}
IDS = {
    "image_start_tag_id": 15,
    "image_end_tag_id": 14,
    "scale_start_token_id": 16,
    "scale_end_token_id": 18,
    "image_start_token_id": 20,
    "image_end_token_id": 39,
}
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "vocab_size": 40,
    "semantic_side": 4,
    "torch_dtype": "float32",
    "rope_scaling": None,
}
DTOK = LlamaConfig(
    dim=16, depth=2, heads=2, kv_heads=2, hidden=24, vocab=20, condition="features", condition_size=24, absolute=19
)

TA_TOK = TATokConfig(
    width=24,
    code_width=10,
    codes=30,
    depth=2,
    heads=12,
    hidden=16,
    places=4,
    encoder_depth=2,
    encoder_heads=3,
    encoder_hidden=20,
    patch=3,
    side=5,
    input_size=16,
)
OF_CODES = replace(TA_TOK, encoder_depth=0, encoder_heads=0, encoder_hidden=0, patch=0, side=0, input_size=0)


def words(added: dict[str, int] = ADDED, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json that looks words up."""
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens = [{"id": i, "content": name, **entry} for name, i in added.items()]
    return {**captions.word_level(WORDS, ()), "added_tokens": tokens, **changes}


def language_model(folder: Path, config: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None) -> Path:
    """A folder as Hugging Face lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tiny_qwen().state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **IDS} if config is None else config))
    (folder / "tokenizer.json").write_text(json.dumps(words() if tokenizer is None else tokenizer))
    return folder


def detokenizer_state(config: LlamaConfig = DTOK, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=g) for k, v in Llama(config).state_dict().items()}


def tiny_ta_tok(config: TATokConfig = TA_TOK, seed: int = 0) -> TATok:
    g = torch.Generator().manual_seed(seed)
    net = TATok(config)
    state = {k: torch.randn(v.shape, generator=g) * 0.5 for k, v in net.state_dict().items()}
    state |= {k: v for k, v in net.state_dict().items() if k.startswith("scale_layer.")}
    net.load_state_dict(state)
    return net.eval().requires_grad_(False)
