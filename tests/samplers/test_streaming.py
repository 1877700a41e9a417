"""Weights off the device: every sampler takes them through the layers, with equal results and bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fastar_nodes.model_loaders.networks import ops
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.cspd import cspd
from fastar_nodes.samplers.mar.fasthybrid import fasthybrid
from fastar_nodes.samplers.mar.lazymar import lazymar
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.memory import STREAMED, WEIGHTS, total
from fastar_nodes.samplers.mar.settings import CSpDSettings, FastHybridSettings, LazyMARSettings, MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.mulosd import mulosd
from fastar_nodes.samplers.tokens.par import par
from fastar_nodes.samplers.tokens.settings import (
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TarPromptSettings,
    ZipARSettings,
)
from fastar_nodes.samplers.tokens.tar import tar_prompt
from fastar_nodes.samplers.tokens.zipar import zipar
from qwen_reference import TINY, tiny_tar
from tiny_hybrids import tiny_hybrid
from tiny_models import tiny_mar
from tiny_tokens import UP
from tokens_reference import condition_of, tiny_gpt
from torch import nn

FEW = {"ar_steps": 6, "diffusion_steps": 4, "cfg": 3.0}
LAZY = {"refresh_period": 3, "start_step": 1, "computed_ratio": 0.2, "block": 1}
TOKENS = {"cfg": 2.5, "top_k": 8}
PROMPTS = PromptCondition(("a dog", "two red apples in a blue bowl"))


class Storage:
    """A device of its own for weights: layers hold meta tensors, and copies of the weights exist only while they are lent."""

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


def masked(sampler, settings) -> Callable[[Any], tuple[torch.Tensor, Any]]:
    def run(model):
        condition = from_ids([1, 4]) if model.condition == "class" else PROMPTS
        out = finish(sampler(model, condition, settings, PairedNoise(3, range(2))))
        return out.latents, out.report

    return run


def coded(sampler, settings, **more) -> Callable[[Any], tuple[torch.Tensor, Any]]:
    def run(model):
        condition = condition_of(model.net.config.condition)
        out = finish(sampler(model, condition, settings, PairedDraws(5, range(len(condition))), **more))
        return out.codes, out.report

    return run


def words(model, parallel: int = 0) -> tuple[torch.Tensor, Any]:
    settings = TarPromptSettings(detail="729", top_k=0, top_p=1.0, parallel=parallel)
    out = finish(tar_prompt(model, ["cat", "a red dog"], settings, PairedDraws(1, range(2)), 1))
    return torch.stack(out.condition.codes), out.report


# Functions that make a model, and that run it.
CASES = {
    "MAR": (tiny_mar, masked(mar, MARSettings(**FEW))),
    "LazyMAR": (tiny_mar, masked(lazymar, LazyMARSettings(**FEW, **LAZY))),
    "CSpD": (tiny_mar, masked(lambda *a: cspd(*a, draft=tiny_mar(1)), CSpDSettings(**FEW, draft_length=2))),
    "Harmon, MAR": (tiny_hybrid, masked(mar, MARSettings(**FEW))),
    "Harmon, FastHybrid": (tiny_hybrid, masked(fasthybrid, FastHybridSettings(**FEW, lookahead=3, guided_steps=2))),
    "Harmon, LazyMAR": (tiny_hybrid, masked(lazymar, LazyMARSettings(**FEW, **LAZY))),
    "LlamaGen": (tiny_gpt, coded(llamagen, LlamaGenSettings(**TOKENS))),
    "LlamaGen, text": (lambda: tiny_gpt("text"), coded(llamagen, LlamaGenSettings(**TOKENS))),
    "AR-DTok": (lambda: tiny_gpt("features"), coded(llamagen, LlamaGenSettings(**TOKENS))),
    "ZipAR": (tiny_gpt, coded(zipar, ZipARSettings(**TOKENS, window=2))),
    "PAR": (lambda: tiny_gpt(special=3), coded(par, PARSettings(**TOKENS))),
    "MuLo-SD": (
        lambda: tiny_gpt(grid=6),
        coded(mulosd, MuLoSDSettings(**TOKENS), draft=tiny_gpt(grid=3, seed=1), up_sampler=UP),
    ),
    "Tar": (tiny_tar, words),
    "Tar, untied": (lambda: tiny_tar(replace(TINY, tied=False)), words),
    "Tar, parallel": (tiny_tar, partial(words, parallel=4)),
}


def parts(model: Any) -> list[nn.Module]:
    return list(getattr(model, "parts", {"": model.net}).values())


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", CASES)
def test_weights_off_the_device_give_the_same_result_in_little_memory(name):
    make, run = CASES[name]
    loaded, report = run(make())
    model = make()
    everything = sum(p.nbytes for part in parts(model) for p in part.parameters())
    storage = Storage(*parts(model))
    streamed, other = run(model)
    assert torch.equal(loaded, streamed), "the result changed"
    assert other.counts == report.counts
    assert storage.used == set(storage.held) and storage.now == 0
    assert 0 < storage.most <= storage.largest, "more than one layer at a time"
    on_device = sum(p.nbytes for part in parts(model) for p in part.parameters() if not p.is_meta)
    assert on_device + storage.largest < everything
    assert "streamed from main memory" in other.note and "streamed" not in report.note


def test_a_report_says_what_streams_and_counts_only_what_is_loaded():
    run, model = masked(mar, MARSettings(**FEW)), tiny_hybrid()
    whole = run(model)[1].memory
    Storage(*parts(model))
    partly = run(model)[1].memory
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
