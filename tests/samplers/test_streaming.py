"""Weights off the device: every sampler takes them through the layers, with equal results and bounded memory."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import test_block_contract as blocks
import test_nextstep_contract as continuous
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
import torch.nn.functional as F
from fastar_nodes.networks import ops
from fastar_nodes.networks.autoencoder import VQModel
from fastar_nodes.networks.bitdance import BitDanceText, BlockNetwork
from fastar_nodes.networks.hybrid import HybridModel
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.memory import STREAMED, WEIGHTS, total
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.tokens.tar import TarPromptSettings, tar_prompt
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from qwen_reference import TINY, tiny_tar
from tiny_hybrids import tiny_hybrid
from torch import nn

PROMPTS = PromptCondition(("a dog", "two red apples in a blue bowl", ""))
UNTIED = tiny_tar(replace(TINY, tied=False))


class Storage(ops.Operations):
    """A host's operations: their layers hold meta tensors, and copies of the weights exist only while they are lent."""

    def __init__(self) -> None:
        self.held: dict[nn.Module, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.now = 0
        self.most = 0
        self.used: set[nn.Module] = set()

    def Linear(self, *shape: int, bias: bool = True) -> nn.Module:
        layer = nn.Linear(*shape, bias=bias)
        layer.forward = partial(self._linear, layer)
        return self._added(layer)

    def Embedding(self, *shape: int) -> nn.Module:
        layer = nn.Embedding(*shape)
        layer.forward = partial(self._embedding, layer)
        return self._added(layer)

    def _added(self, layer: nn.Module) -> nn.Module:
        self.held[layer] = (torch.empty(0), None)
        return layer

    def build(self, net: Any) -> Any:
        """The same network of these operations, with its weights off the device."""
        shape = [net.config]
        if isinstance(net, BlockNetwork):
            shape.append(net.head_config)
        if isinstance(net, BitDanceText):
            shape.append(net.block)
        built = type(net)(*shape, self)
        built.load_state_dict(net.state_dict())
        for layer in self.held:
            weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
            self.held[layer] = weight, None if bias is None else bias.detach()
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(parameter.to("meta"), requires_grad=False))

        return built.eval().requires_grad_(False)

    @property
    def largest(self) -> int:
        return max(sum(t.nbytes for t in held if t is not None) for held in self.held.values())

    @contextmanager
    def _lent(self, layer):
        copies = [None if t is None else t.clone() for t in self.held[layer]]
        size = sum(t.nbytes for t in copies if t is not None)
        self.now += size
        self.most = max(self.most, self.now)
        self.used.add(layer)
        yield copies
        self.now -= size
        for t in copies:
            if t is not None:
                t.fill_(torch.nan)  # a later use would spoil the result

    def _linear(self, layer, x):
        with self._lent(layer) as (weight, bias):
            return F.linear(x, weight, bias)

    def _embedding(self, layer, ids):
        with self._lent(layer) as (weight, _):
            return F.embedding(ids, weight)

    @contextmanager
    def weight(self, layer, x):
        with self._lent(layer) as (weight, _):
            yield weight

    def offloaded(self, net):
        return [layer for layer in net.modules() if layer in self.held]


def stored(model: Any) -> tuple[Any, Storage]:
    """A model whose weights are off the device."""
    storage = Storage()
    if isinstance(model, HybridModel):
        hybrid = storage.build(model.hybrid)
        return replace(model, hybrid=hybrid, net=hybrid.mar), storage

    return replace(model, net=storage.build(model.net)), storage


def harmon(name, move):
    """A masked sampler on a model that has read no prompt yet."""
    return masked.start(name, move=move, model=tiny_hybrid(), condition=PROMPTS)


# Cases of the contracts, and on a model inside a language model; the prompt encoder of Tar also with untied embeddings.
CASES: dict[str, Any] = {
    **{name: partial(masked.start, name) for name in ("mar", "lazymar", "cspd")},
    **{f"Harmon, {name}": partial(harmon, name) for name in ("mar", "fasthybrid", "lazymar")},
    **{name: partial(tokens.start, name) for name in ("llamagen", "par", "zipar", "mulosd", "prompt", "window, text")},
    **{name: partial(blocks.start, name) for name in ("bitdance", "bitdance, single tokens", "bitdance, prompts")},
    **{name: partial(continuous.start, name) for name in ("nextstep", "nextstep, edits")},
    "features": partial(tokens.start, "llamagen, features, grouped heads"),
    "untied": lambda move: tar_prompt(move(UNTIED), ["cat", "a dog"], TarPromptSettings(), TokenNoise(1, (0, 1))),
}


def parts(model: Any) -> list[nn.Module]:
    return list(getattr(model, "parts", {"": model.net}).values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast_cases("mar", "mulosd", "nextstep")
def test_weights_off_the_device_give_the_same_result_in_little_memory(name):
    loaded, report, *_ = finish(CASES[name](move=lambda model: model))
    nets, stores = [], []

    def move(model):
        if isinstance(model, VQModel):
            return model

        model, storage = stored(model)
        stores.append(storage)
        nets.extend(parts(model))
        everything.append(sum(p.nbytes for part in parts(model) for p in part.parameters()))
        return model

    everything: list[int] = []
    streamed, other, *_ = finish(CASES[name](move=move))
    assert torch.equal(loaded, streamed), "the result changed"
    assert other.counts == report.counts
    for storage in stores:
        assert storage.used == set(storage.held) and storage.now == 0
        assert 0 < storage.most <= storage.largest, "more than one layer at a time"
    on_device = sum(p.nbytes for part in nets for p in part.parameters() if not p.is_meta)
    assert on_device + sum(storage.largest for storage in stores) < sum(everything)
    assert "are in system memory" in other.note and "in system memory" not in report.note


def test_a_report_says_what_streams_and_counts_only_what_is_loaded():
    model, storage = stored(tiny_hybrid())

    def memory(model):
        _, settings = masked.CASES["mar"]
        return finish(Drawing(SAMPLERS["mar"], model, settings, PROMPTS, 3, range(3)).steps()).report.memory

    whole = memory(tiny_hybrid())
    partly = memory(model)
    names = [name for name in partly if name.endswith(STREAMED)]
    assert names == [f"{WEIGHTS}{part}{STREAMED}" for part in ("language model", "MAR")]
    away = sum(partly[name] for name in names)
    assert away == sum(p.nbytes for layer in storage.held for p in layer.parameters())
    assert total(partly) == total(whole) - away
    assert sum(whole.values()) == sum(partly.values())


def test_a_draft_that_streams_is_not_counted_as_loaded():
    draft, storage = stored(tiny_hybrid(1))
    settings = CSpDSettings(steps=4, diffusion_steps=2)

    def memory(draft):
        drawing = Drawing(SAMPLERS["cspd"], tiny_hybrid(), settings, PROMPTS, 3, range(3), draft=draft)
        return finish(drawing.steps()).report.memory

    found = memory(draft)
    away = sum(p.nbytes for layer in storage.held for p in layer.parameters())
    assert away == sum(count for name, count in found.items() if name.endswith(STREAMED)) > 0

    loaded = memory(tiny_hybrid(1))
    assert total(found) == total(loaded) - away
    assert loaded["weights: draft MAR"] == found["weights: draft MAR"] + found[f"weights: draft MAR{STREAMED}"]


def test_the_head_tables_and_norms_are_always_loaded():
    model, _ = stored(tiny_hybrid())
    loaded = [name for name, p in model.hybrid.named_parameters() if not p.is_meta]
    blocks = [n for n in loaded if "_blocks." in n or ".layers." in n]
    assert blocks and all("norm" in n or ".diffloss." in n for n in blocks)
    assert {n for n, _ in model.hybrid.named_parameters() if ".diffloss." in n} < set(loaded)
    assert {"mar.mask_token", "mar.encoder_norm.weight", "proj_in.0.weight"} < set(loaded)
