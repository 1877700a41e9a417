"""Names and shapes of a tiny hybrid."""

from __future__ import annotations

from fastar_nodes.model_loaders.networks.hybrid import Hybrid, HybridConfig
from fastar_nodes.model_loaders.networks.mar import MARConfig
from fastar_nodes.model_loaders.networks.qwen import QwenConfig


def shapes(tokens: int = 16) -> dict[str, tuple[int, ...]]:
    mar = MARConfig(
        dim=16,
        encoder_depth=1,
        decoder_depth=1,
        heads=2,
        buffer=3,
        tokens=tokens,
        channels=4,
        classes=0,
        head_depth=1,
        head_width=16,
    )
    llm = QwenConfig(dim=24, depth=2, heads=4, kv_heads=2, head_dim=6, hidden=32, vocab=13)
    return {name: tuple(t.shape) for name, t in Hybrid(HybridConfig(mar, llm)).state_dict().items()}
