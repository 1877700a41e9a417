"""A tiny hybrid in the official layout: its names and shapes, weights, configuration and tokenizer."""

import json
from typing import Any

import torch
from fastar_nodes.lab.training import captions
from fastar_nodes.networks.hybrid import Hybrid, HybridConfig
from fastar_nodes.networks.llama import qwen_config
from fastar_nodes.networks.mar import MARConfig

WORDS = ["[UNK]", "user", "assistant", "generate", "an", "image", "a", "red", "boat", ":", "."]
# Their ids follow those of the words.
MARKS = ["<|im_start|>", "<|im_end|>"]
TOKENIZER = captions.word_level(WORDS, MARKS)
CONFIG = {"llm": {"num_attention_heads": 4}, "mar": {"encoder_num_heads": 2}}
METADATA = {"config": json.dumps(CONFIG), "tokenizer": json.dumps(TOKENIZER)}


def config(tokens: int = 16, **language: Any) -> HybridConfig:
    shape = {"dim": 16, "encoder_depth": 1, "decoder_depth": 1, "heads": 2, "head_depth": 1, "head_width": 16}
    mar = MARConfig(**shape, buffer=3, tokens=tokens, channels=4, classes=0)
    llm = qwen_config(dim=24, depth=2, heads=4, kv_heads=2, head_dim=6, hidden=32, **{"vocab": 13, **language})
    return HybridConfig(mar, llm)


def shapes(tokens: int = 16) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in Hybrid(config(tokens)).state_dict().items()}


def weights(tokens: int = 16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=g) * 0.1 for name, shape in shapes(tokens).items()}
