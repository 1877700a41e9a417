"""Weights off the device: every sampler takes them through the layers, with equal results and bounded memory."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
from fastar_nodes.model_loaders.networks import ops
from fastar_nodes.model_loaders.networks.autoencoder import VQModel
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.memory import STREAMED, WEIGHTS, total
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.settings import TarPromptSettings
from fastar_nodes.samplers.tokens.tar import tar_prompt
from qwen_reference import TINY, tiny_tar
from tiny_hybrids import tiny_hybrid
from torch import nn

PROMPTS = PromptCondition(("a dog", "two red apples in a blue bowl", ""))
UNTIED = tiny_tar(replace(TINY, tied=False))


class Storage:
    """A device of its own for weights: layers hold meta tensors,
    and copies of the weights exist only while they are lent.
    """

    def __init__(self, *nets: nn.Module):
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.now = self.most = 0
        self.used: set[int] = set()
        for layer in (layer for net in nets for layer in ops.streamed_layers(net)):
            held = [None if t is None else t.detach().clone() for t in (layer.weight, getattr(layer, "bias", None))]
            self.held[id(layer)] = held[0], held[1]
            for name, t in zip(("weight", "bias"), held, strict=True):
                if t is not None:
                    setattr(layer, name, nn.Parameter(t.to("meta"), requires_grad=False))
            layer.source = self

    @property
    def largest(self) -> int:
        return max(sum(t.nbytes for t in held if t is not None) for held in self.held.values())

    def is_offloaded(self, layer: Any) -> bool:
        return True

    @contextmanager
    def stream_weight(self, layer, x, rows=None):
        copies = [None if t is None else t.clone() for t in self.held[id(layer)]]
        if rows is not None:
            copies = [copies[0][slice(*rows)].clone(), None]
        size = sum(t.nbytes for t in copies if t is not None)
        self.now += size
        self.most = max(self.most, self.now)
        self.used.add(id(layer))
        yield tuple(copies)
        self.now -= size
        for t in copies:
            if t is not None:
                t.fill_(torch.nan)  # a later use would spoil the result

    def look_up(self, layer, ids):
        self.used.add(id(layer))
        return self.held[id(layer)][0][ids]


def harmon(name, move):
    """A masked sampler on a model that has read no prompt yet."""
    return masked.start(name, move=move, model=tiny_hybrid(), condition=PROMPTS)


# Cases of the contracts, and on a model inside a language model; the prompt encoder of Tar also with untied embeddings.
CASES: dict[str, Any] = {
    **{name: partial(masked.start, name) for name in ("mar", "lazymar", "cspd")},
    **{f"Harmon, {name}": partial(harmon, name) for name in ("mar", "fasthybrid", "lazymar")},
    **{name: partial(tokens.start, name) for name in ("llamagen", "par", "zipar", "mulosd", "prompt", "window, text")},
    "features": partial(tokens.start, "llamagen, features, grouped heads"),
    "untied": lambda move: tar_prompt(move(UNTIED), ["cat", "a dog"], TarPromptSettings(), PairedDraws(1, (0, 1))),
}


def parts(model: Any) -> list[nn.Module]:
    return list(getattr(model, "parts", {"": model.net}).values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast_cases("mar", "lazymar", "mulosd", "llamagen")
def test_weights_off_the_device_give_the_same_result_in_little_memory(name):
    loaded, report, *_ = finish(CASES[name](move=lambda model: model))
    nets, stores = [], []

    def move(model):
        model = copy.deepcopy(model)
        if not isinstance(model, VQModel):
            nets.extend(parts(model))
            everything.append(sum(p.nbytes for part in parts(model) for p in part.parameters()))
            stores.append(Storage(*parts(model)))
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
    assert "streamed from main memory" in other.note and "streamed" not in report.note


def test_a_report_says_what_streams_and_counts_only_what_is_loaded():
    model = tiny_hybrid()

    def memory():
        return finish(masked.start("mar", model=model, condition=PROMPTS)).report.memory

    whole = memory()
    Storage(*parts(model))
    partly = memory()
    names = [name for name in partly if name.endswith(STREAMED)]
    assert names == [f"{WEIGHTS}{part}{STREAMED}" for part in ("language model", "MAR")]
    away = sum(partly[name] for name in names)
    assert away == sum(t.nbytes for p in parts(model) for layer in ops.streamed_layers(p) for t in layer.tensors())
    assert total(partly) == total(whole) - away
    assert sum(whole.values()) == sum(partly.values())


def test_the_head_tables_and_norms_are_always_loaded():
    model = tiny_hybrid()
    assert not ops.streamed_layers(model.net.head)
    streamed = {id(t) for layer in ops.streamed_layers(model.hybrid) for t in layer.tensors()}
    loaded = [name for name, p in model.hybrid.named_parameters() if id(p) not in streamed]
    blocks = [n for n in loaded if "_blocks." in n or ".layers." in n]
    assert blocks and all("norm" in n or ".diffloss." in n for n in blocks)
    assert {"mar.mask_token", "mar.z_proj.weight", "proj_in.0.weight"} < set(loaded)
