"""LlamaGen and PAR as a family."""

from __future__ import annotations

from collections.abc import Sequence

from ...model_loaders.llamagen.loader import load_llamagen
from ...networks.llama import TokenModel
from .tokens import TokenFamily

# The sampler in whose order PAR models were trained, and the weights by which their files are known.
_PAR = "par"
_SPECIAL_TOKENS = "spe_tok_embeddings."


class _LlamaGen(TokenFamily):
    def own_samplers(self, model: TokenModel, names: Sequence[str]) -> list[str]:
        ordered = model.regions > 1
        return [name for name in names if (name == _PAR) == ordered]

    def samplers_of_file(self, names: Sequence[str]) -> tuple[str, ...]:
        ordered = any(name.startswith(_SPECIAL_TOKENS) for name in names)
        return (_PAR,) if ordered else self.usual_samplers


FAMILY = _LlamaGen(
    name="llamagen",
    words="a LlamaGen or PAR",
    load_file=load_llamagen,
    files="llamagen",
    reads=("class", "text"),
    demo=("demo-llamagen", "demo-llamagen-low"),
    usual_samplers=("llamagen", "zipar"),
)
