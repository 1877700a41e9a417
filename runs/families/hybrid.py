"""Harmon and UniPic as a family."""

from __future__ import annotations

from typing import Any

from ...model_loaders.catalogue.hub import Entry
from ...model_loaders.catalogue.official import HYBRID_SIZES
from ...model_loaders.hybrid.loader import load_hybrid
from ...networks.hybrid import Hybrid, HybridModel
from . import network_of, token_a_word
from .masked import MARFamily

# Published settings of Harmon; UniPic, whose largest beta is lower, takes half the AR steps.
_SETTINGS = {"diffusion_steps": 100, "cfg": 3.0, "cfg_schedule": "constant", "temperature": 1.0}
_HARMON_STEPS = 64
_UNIPIC_STEPS = 32
# A hybrid whose largest beta is lower is a UniPic.
_BETA = 0.5


class _Hybrid(MARFamily):
    def network(self, model: HybridModel) -> Hybrid:
        return model.hybrid

    def published(self, model: HybridModel) -> dict[str, Any]:
        return {**_SETTINGS, "steps": _UNIPIC_STEPS if model.max_beta < _BETA else _HARMON_STEPS}

    def outlined(self, entry: Entry) -> HybridModel:
        net: Hybrid = network_of(entry)
        _, _, _, side, max_beta, _ = HYBRID_SIZES[entry.network]

        return HybridModel(
            net.mar,
            entry.id,
            max_beta=max_beta,
            hybrid=net,
            tokenize=token_a_word,
            turn=(1, 2),
            trained=side,
        )


FAMILY = _Hybrid(
    name="hybrid",
    words="a Harmon or UniPic",
    load_file=load_hybrid,
    files="hybrid",
    reads=("prompt",),
    reads_negatives=True,
    tokenizer="qwen2.5-tokenizer",
    demo=("demo-hybrid",),
    usual_samplers=("mar", "fasthybrid"),
)
