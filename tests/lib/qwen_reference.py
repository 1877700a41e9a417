"""Tiny Qwen2 networks and Tar models, and the same network in transformers."""

import pytest
import torch
from fastar_nodes.networks.llama import Llama, LlamaConfig, qwen_config
from fastar_nodes.networks.tar import SpecialTokens, TarModel
from torch import Tensor, nn

TINY = qwen_config(
    dim=24,
    depth=2,
    heads=6,
    kv_heads=2,
    head_dim=4,
    hidden=20,
    vocab=40,
    tied=True,
    positions=64,
    theta=100.0,
    eps=1e-6,
)


def tiny_qwen(config: LlamaConfig = TINY, seed: int = 0) -> Llama:
    """Random weights of a scale at which attention and logits differ between positions."""
    g = torch.Generator().manual_seed(seed)
    net = Llama(config)
    net.load_state_dict({k: torch.randn(v.shape, generator=g) * 0.4 for k, v in net.state_dict().items()})
    return net.eval().requires_grad_(False)


# Text tokens 0 to 14, start of an image 15, three scales, then 20 codes.
MARKS = SpecialTokens(image=15, scale=16, code=20, codes=20)


def tiny_tar(
    config: LlamaConfig = TINY, seed: int = 0, sides: tuple[int, ...] = (4, 2, 1), penalty: float = 1.0
) -> TarModel:
    """A language model whose tokenizer maps a word to its length, at most 14."""
    return TarModel(
        tiny_qwen(config, seed),
        "tiny",
        lambda text: [min(14, len(word)) for word in text.split()],
        MARKS,
        sides,
        penalty,
    )


def language_logits(net: Llama, ids: Tensor, span: tuple[int, int] | None = None) -> Tensor:
    """Logits of whole sequences of token ids, without a cache."""
    n = ids.shape[1]
    return net(net.tok_embeddings(ids), torch.arange(-n, 0), net.positions(0, n), span=span)


def transformers_qwen(config: LlamaConfig) -> nn.Module:
    """The same network in transformers."""
    tf = pytest.importorskip("transformers", reason="the language model is compared with that of transformers")
    c = config
    size = dict(vocab_size=c.vocab, hidden_size=c.dim, intermediate_size=c.hidden, num_hidden_layers=c.depth)
    heads = dict(num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.positions)
    rest = dict(rms_norm_eps=c.eps, rope_theta=c.theta, tie_word_embeddings=c.tied)
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**size, **heads, **rest)).eval()
