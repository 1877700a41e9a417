"""Reference Qwen2: one sequence, one head, one position at a time, in float64; and tiny networks."""

from __future__ import annotations

import torch
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig, qwen_config
from fastar_nodes.model_loaders.networks.tar import SpecialTokens, TarModel
from torch import Tensor

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
    return net(net.embed(ids), torch.arange(-n, 0), net.positions(0, n), span=span)


def plain_logits(state: dict[str, Tensor], config: LlamaConfig, ids: list[int]) -> Tensor:
    """Logits float64 [n, vocab] of one sequence."""
    w = {name: t.double() for name, t in state.items()}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + config.eps).sqrt() * weight

    def rotated(x: Tensor, at: int) -> Tensor:
        half = len(x) // 2
        out = x.clone()
        for i in range(half):
            angle = torch.tensor(at * config.theta ** (-i / half), dtype=torch.float64)
            out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return out

    rows = [w["model.embed_tokens.weight"][i] for i in ids]
    d = config.head_dim
    for layer in range(config.depth):
        p = f"model.layers.{layer}."

        def project(x: Tensor, part: str, p: str = p) -> Tensor:
            return w[f"{p}self_attn.{part}_proj.weight"] @ x + w[f"{p}self_attn.{part}_proj.bias"]

        normed = [norm(x, w[f"{p}input_layernorm.weight"]) for x in rows]
        q, k, v = ([project(x, part).view(-1, d) for x in normed] for part in "qkv")
        for at in range(len(rows)):
            heads = []
            for head in range(config.heads):
                own = head // (config.heads // config.kv_heads)
                query = rotated(q[at][head], at)
                scores = torch.stack([query @ rotated(k[j][own], j) / d**0.5 for j in range(at + 1)]).softmax(0)
                heads.append(sum(scores[j] * v[j][own] for j in range(at + 1)))
            rows[at] = rows[at] + w[f"{p}self_attn.o_proj.weight"] @ torch.cat(heads)
        for at, x in enumerate(rows):
            y = norm(x, w[f"{p}post_attention_layernorm.weight"])
            gate = w[f"{p}mlp.gate_proj.weight"] @ y
            inner = gate * gate.sigmoid() * (w[f"{p}mlp.up_proj.weight"] @ y)
            rows[at] = x + w[f"{p}mlp.down_proj.weight"] @ inner
    head = w["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    return torch.stack([head @ norm(x, w["model.norm.weight"]) for x in rows])


def official_names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen2 checkpoint, from its published layout."""
    c, kv = config, config.kv_heads * config.head_dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, c.dim), "model.norm.weight": (c.dim,)}
    for n in range(c.depth):
        p = f"model.layers.{n}."
        out |= {f"{p}input_layernorm.weight": (c.dim,), f"{p}post_attention_layernorm.weight": (c.dim,)}
        out |= {f"{p}self_attn.q_proj.weight": (c.dim, c.dim), f"{p}self_attn.q_proj.bias": (c.dim,)}
        for part in "kv":
            out |= {f"{p}self_attn.{part}_proj.weight": (kv, c.dim), f"{p}self_attn.{part}_proj.bias": (kv,)}
        out |= {f"{p}self_attn.o_proj.weight": (c.dim, c.dim)}
        out |= {f"{p}mlp.{part}_proj.weight": (c.hidden, c.dim) for part in ("gate", "up")}
        out |= {f"{p}mlp.down_proj.weight": (c.dim, c.hidden)}
    return out if c.tied else out | {"lm_head.weight": (c.vocab, c.dim)}
