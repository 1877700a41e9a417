"""A tiny random hybrid whose tokenizer maps characters to ids."""

from fastar_nodes.networks.hybrid import Hybrid, HybridConfig, HybridModel
from fastar_nodes.networks.llama import qwen_config
from fastar_nodes.networks.mar import MARConfig
from tiny_models import drawn

TURN = 126, 127


def characters(text: str) -> list[int]:
    return [ord(c) % 126 for c in text]


def tiny_hybrid(
    seed: int = 0, tokens: int = 16, max_beta: float = 0.999, positions: int = 400, **mar: int
) -> HybridModel:
    shape = {"dim": 16, "encoder_depth": 2, "decoder_depth": 2, "heads": 2, "head_depth": 2, "head_width": 16} | mar
    config = HybridConfig(
        MARConfig(**shape, buffer=3, tokens=tokens, channels=4, classes=0),
        qwen_config(dim=24, depth=2, heads=4, kv_heads=2, head_dim=6, hidden=32, vocab=128, positions=positions),
    )
    net = drawn(Hybrid(config), seed, 0.8, 0.2)
    net.llm.tok_embeddings.weight.mul_(5)
    return HybridModel(
        net.mar,
        f"tiny hybrid {seed}",
        latent_scale=0.5,
        t_max=950,
        max_beta=max_beta,
        hybrid=net,
        tokenize=characters,
        turn=TURN,
        trained=net.mar.config.grid,
    )
