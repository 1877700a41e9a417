"""Models of official sizes with random weights; here with tiny networks in place of the official ones."""

from dataclasses import replace

import pytest
import torch
from block_models import text_bitdance, tiny_bitdance
from fastar_nodes.lab.work import sizes
from fastar_nodes.networks.bitdance import BitDanceClass, BitDanceText
from fastar_nodes.networks.nextstep import NextStepConfig
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.blocks.bitdance import bitdance
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.nextstep.nextstep import nextstep
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import PairedNoise
from nextstep_models import tiny_nextstep

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FEW = BlockSettings(diffusion_steps=2)


def of_classes() -> BitDanceClass:
    """The network of a tiny ImageNet model."""
    net = tiny_bitdance().net
    return BitDanceClass(net.config, net.head_config)


def of_prompts() -> BitDanceText:
    """The network of a tiny text model, whose ids are those of a 14B."""
    net = text_bitdance().net
    ids = sizes._TURN[1] + 2 + sizes._BITDANCE_SIDES + net.block - 1
    config = type(net.config)(**{**vars(net.config), "vocab": ids})
    return BitDanceText(config, net.head_config, net.block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_of_a_random_bitdance_has_a_value(dtype, monkeypatch):
    monkeypatch.setattr(sizes, "official_bitdance", lambda size: of_classes())
    torch.manual_seed(0)
    net = sizes.random_bitdance("BitDance-B-4x", dtype, CPU).net

    for name, weight in net.named_parameters():
        assert weight.dtype == dtype and not weight.requires_grad
        is_norm = weight.ndim == 1 and name.endswith("weight")
        if is_norm:
            assert bool((weight == 1).all()), name
        else:
            assert float(weight.abs().max()) < 2, name

    assert float(net.layers[0].attention.wqkv.weight.std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_random_bitdance_of_classes_draws_an_image(dtype, monkeypatch):
    monkeypatch.setattr(sizes, "official_bitdance", lambda size: of_classes())
    model = sizes.random_model("BitDance-B-4x", dtype, CPU).model

    out = finish(bitdance(model, from_ids((2,)), FEW, PairedNoise(1, (0,))))

    assert model.name == "BitDance-B-4x, random weights"
    assert bool((out.latents.abs() == 1).all())


def test_a_random_bitdance_of_prompts_reads_them(monkeypatch):
    monkeypatch.setattr(sizes, "official_bitdance", lambda size: of_prompts())
    model = sizes.random_model("BitDance-14B-64x", "fp32", CPU).model
    marks = model.marks

    ids = [marks.image, *marks.sizes.values(), *marks.queries]
    assert ids == list(range(marks.image, model.net.config.vocab))
    assert list(marks.sizes) == list(range(1, 257)) and len(marks.queries) == model.net.block - 1

    settings = BlockSettings(diffusion_steps=2, width=8, height=16)
    small = replace(model, stride=2)
    out = finish(bitdance(small, PromptCondition(("two red cats",)), settings, PairedNoise(1, (0,))))

    assert len(model.tokenize("two red cats")) == 3
    assert out.latents.shape == (1, model.net.channels, 8, 4)
    assert bool((out.latents.abs() == 1).all())


def small_nextstep() -> NextStepConfig:
    """A tiny NextStep, whose ids are those of a 14B."""
    return replace(tiny_nextstep().net.config, vocab=sizes._NEXTSTEP_MARKS.place + 1)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_random_nextstep_reads_prompts(dtype, monkeypatch):
    """Its last layer and what depends on the condition in its head are zero, as at the start of a training."""
    monkeypatch.setattr(sizes, "official_nextstep", small_nextstep)
    ready = sizes.random_models("NextStep-14B", [SAMPLERS["nextstep"]], dtype, CPU)["nextstep"]
    model = replace(ready.model, stride=2)
    assert ready.family == "nextstep" and model.name == "NextStep-14B, random weights"
    assert model.usual_size == (64, 64) and ready.model.usual_size == (512, 512)
    assert not list(model.net.buffers()) and all(bool(weight.isfinite().all()) for weight in model.net.parameters())

    settings = NextStepSettings(diffusion_steps=2, width=4, height=6)
    out = finish(nextstep(model, PromptCondition(("two red cats",)), settings, PairedNoise(1, (0,))))
    assert len(model.tokenize("two red cats")) == 3 and out.latents.shape == (1, 4, 6, 4)
    zero = {name for name, weight in model.net.image_head.named_parameters() if not weight.any()}
    assert {name for name in zero if name.endswith("weight")} == {
        name
        for name, _ in model.net.image_head.named_parameters()
        if name.endswith("weight") and ("adaLN" in name or "final_layer.linear" in name)
    }


def test_random_weights_are_the_same_in_every_call(monkeypatch):
    monkeypatch.setattr(sizes, "official_bitdance", lambda size: of_classes())
    before = torch.get_rng_state()
    one, two = (sizes.random_model("BitDance-B-4x", "fp32", CPU).model.net for _ in range(2))

    assert torch.equal(torch.get_rng_state(), before)
    for mine, other in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, other)
