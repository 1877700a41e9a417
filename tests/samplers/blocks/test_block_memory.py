"""The memory of a BitDance: numbers by hand, a 14B of a quarter of the depth on the meta device, and reports."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from block_models import bits, text_bitdance, tiny_bitdance
from fastar_nodes.model_loaders.catalogue.official import official_bitdance
from fastar_nodes.networks.bitdance import BitDanceText, BlockModel
from fastar_nodes.networks.ops import quantize
from fastar_nodes.networks.quantized import INT8
from fastar_nodes.reports.record import Report
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.memory import HEAD, KV_CACHE, NOISE, POSITIONS, TRANSFORMER, WEIGHTS, total
from fastar_nodes.runs.memory import blocks as memory
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers import chain, diffusion_steps
from fastar_nodes.samplers.blocks.diffusion import head_calls
from fastar_nodes.samplers.blocks.settings import BlockSettings
from fastar_nodes.samplers.chain import MODULATION_BUDGET
from fastar_nodes.samplers.conditioning import PromptCondition, from_ids
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.noise import CounterRNG
from fastar_nodes.samplers.speculation import Speculation
from live_bytes import counted

GB = 1e9
FEW = BlockSettings(diffusion_steps=4, cfg=2.0)


def test_a_run_by_hand():
    """Two images with guidance are 4 rows of the batch; 2 prefix rows, 16 tokens of 6 bits in blocks of 4, width 32."""
    found = memory.estimate(tiny_bitdance(), from_ids((1, 2)), FEW)

    # Keys and values of 2 layers of width 32, fp32.
    assert found[KV_CACHE] == 4 * (2 + 16) * 2 * 2 * 32 * 4
    # Position rows of width 32; RoPE of 2 prefix rows, the first block, and the tokens, two numbers each of a head.
    assert found[POSITIONS] == 4 * (16 * 32 + 2 * (2 + 4 + 16) * 16)
    # Start noise, 4 steps, and one more; as drawn, and in the order of the tokens.
    assert found[NOISE] == 2 * 4 * 2 * 6 * 16 * 6
    # The head of width 64 has 6 x 64 modulations, and 2 x 64 of its last layer, of 4 x 4 rows at 5 evaluations.
    assert found[HEAD] == (3 * 4 * 4 * 8 * 64 * 5 + 14 * 4 * 4 * 64) * 4 + 4 * 6 * 4 * 4 * 6

    # A pass has a block of 4 tokens in each row of the batch, of an edit all 16 at most.
    assert 4 * found[TRANSFORMER] == memory.estimate(tiny_bitdance(), from_ids((1, 2)), FEW, edited=True)[TRANSFORMER]
    half = memory.estimate(tiny_bitdance(), from_ids((1, 2)), replace(FEW, cfg=1.0))
    assert 2 * half[KV_CACHE] == found[KV_CACHE] and 2 * half[HEAD] == found[HEAD]


@torch.no_grad()
@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.fast_cases("True-2.0")
def test_a_window_holds_what_is_estimated(monkeypatch, cfg, given):
    """Tokens of so many bits that the states of a window decide, and a call for each state."""
    monkeypatch.setattr(memory, "MODULATION_BUDGET", 1)
    model = tiny_bitdance(block=16, channels=512)
    settings = BlockSettings(diffusion_steps=40, cfg=cfg, speculation=8)
    work = memory.estimate(model, from_ids((1, 2)), settings)[HEAD]
    branches = 1 + (cfg != 1)

    made = head_calls(40)
    t = torch.tensor(made.times)
    table = diffusion_steps.step_table(made.steps, model.net.denoiser.times(t))
    start = torch.randn(2, 16, 512)
    noise = torch.randn(40, 2, 16, 512)
    known = chain.FixedTokens(t, start, torch.ones(2, 16, 512), torch.rand(2, 16, 1) > 0.5) if given else None
    report = Report("bitdance", "tiny", {}, 0, 2, "cpu", memory={})
    scale = torch.full((2, 1, 1), cfg)
    with counted(monkeypatch) as live:
        rows = chain.DiffusionBatch(torch.randn(branches, 2, 16, 32), scale, start, noise, table, fixed_tokens=known)
        head = chain.SpeculationHead(model.net, model.net.denoiser, rows, report, 1)
        paths = Speculation(model.net, head, rows, CounterRNG(torch.arange(2)), report)
        windows = paths.windows(np.arange(2), 8)
        for _ in range(3):
            next(windows)
    assert live.peak < work < 3 * live.peak


def test_weights_are_counted_once_and_by_part():
    model = text_bitdance()
    whole = {id(weight) for weight in model.net.parameters()}
    of_parts = [id(weight) for part in model.parts.values() for weight in part.parameters()]
    assert len(of_parts) == len(set(of_parts)) and set(of_parts) == whole

    found = memory.estimate(model, PromptCondition(("a boat",)), replace(FEW, width=8, height=8))
    head = sum(weight.nbytes for weight in model.net.denoiser.parameters())
    assert found[f"{WEIGHTS}head"] == head
    assert found[f"{WEIGHTS}transformer"] == sum(weight.nbytes for weight in model.net.parameters()) - head


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("model", [tiny_bitdance(), text_bitdance()], ids=["class", "prompt"])
def test_a_report_holds_the_estimate_and_the_cache_is_within_it(model, edited):
    settings = FEW if model.condition == "class" else replace(FEW, width=8, height=8)
    condition = from_ids((1,)) if model.condition == "class" else PromptCondition(("a red house",))
    edit = None
    if edited:
        grid = model.grid(settings.height, settings.width)
        mask = torch.zeros(1, *grid)
        mask[:, -1, -1] = 1
        edit = Edit(bits(1, model, grid), mask)

    report = finish(Drawing(SAMPLERS["bitdance"], model, settings, condition, 5, (0,), edit).steps()).report
    assert report.memory == memory.estimate(model, condition, settings, edited)
    assert report.counts["cache_bytes"] == report.memory[KV_CACHE]


# ------------------------------------------------------------------------------------------------ a 14B


def large(depth: int | None = None) -> BlockModel:
    """The 14B of blocks of 64 tokens in bf16, or as many of its layers, without weights."""
    with torch.device("meta"):
        net = official_bitdance("BitDance-14B-64x")
        if depth is not None:
            assert isinstance(net, BitDanceText)
            net = BitDanceText(replace(net.config, depth=depth), net.head_config, net.block)
        net = net.to(torch.bfloat16).eval().requires_grad_(False)

    # A token a word, and the sizes of the tokenizer; the ids do not matter.
    marks = replace(text_bitdance().marks, sizes=dict.fromkeys(range(1, 257), 0), queries=(0,) * (net.block - 1))
    return BlockModel(net, "14B", stride=16, tokenize=lambda text: [0] * len(text.split()), marks=marks)


@pytest.mark.slow
def test_a_14b_of_8_bits_fits_a_card_of_24_gigabytes_with_an_image_of_1024_pixels():
    """Language model and head together; the autoencoder follows when they are done. In bf16 neither fits."""
    condition = PromptCondition(("a red boat on a calm lake",))
    model = large()
    whole = memory.estimate(model, condition, BlockSettings())
    assert whole[f"{WEIGHTS}head"] == 2 * 1_758_464_032
    # Keys and values of 8 heads of 128 numbers in 40 layers: 160 KiB a row.
    assert whole[KV_CACHE] == pytest.approx(2 * 4096 * 160 * 1024, rel=0.02)
    assert total(whole) > 32 * GB

    quantize(model.net, INT8)
    eight = memory.estimate(model, condition, BlockSettings())
    assert eight[f"{WEIGHTS}transformer"] == pytest.approx(13.2 * GB + 1.56 * GB + 0.05 * GB, rel=0.01)
    assert total(eight) < 21 * GB < (24 - 1) * 2**30


@torch.no_grad()
@pytest.mark.slow
def test_passes_of_a_quarter_of_a_14b_hold_what_is_estimated(monkeypatch):
    """Ten layers of 40, at full width: no less than what is alive, and at most three times as much."""
    model = large(10)
    net = model.net
    grid = model.grid(None, None)
    settings = BlockSettings()
    text = "word " * 60
    work = memory.estimate(model, PromptCondition((text,)), settings)
    rows = len(model.prompt(text)) + 2  # and the start of the image, and its height

    with torch.device("meta"):
        prefix = torch.empty(2, rows, 5120, dtype=torch.bfloat16)
        first = torch.empty(2, 64, 5120, dtype=torch.bfloat16)
        tokens = torch.empty(2, 64, 32)
        x = torch.empty(2, 64, 32)
        places = torch.empty(64, 5120)

        with counted(monkeypatch) as live:
            _, cache = net.begin(prefix, torch.full((2,), rows), first, grid)
        assert cache.bytes == work[KV_CACHE]
        assert cache.positions.table.nbytes + places.nbytes * 64 <= work[POSITIONS]
        assert live.peak - cache.bytes - cache.positions.table.nbytes < work[TRANSFORMER]

        with counted(monkeypatch) as live:
            hidden = net.advance(net.embed(tokens, places), 64, cache)
        assert live.peak < work[TRANSFORMER] < 3 * live.peak

        count = settings.diffusion_steps
        times = torch.empty(count + 1, 5120, dtype=torch.bfloat16)
        with counted(monkeypatch) as live:
            table = diffusion_steps.StepTable(torch.empty(count + 1, 8), times, False)
            z = (hidden + places)[:, None].to(torch.bfloat16)
            rows = chain.DiffusionBatch(z, x, x[:1], x, table)
            head = chain.FullChainHead(
                net, net.denoiser, rows, Report("bitdance", "14B", {}, 0, 1, "meta"), MODULATION_BUDGET
            )
            scale = torch.ones(1, 1, 1)
            for k in range(20):  # the modulations of 14 evaluations are computed at once
                head.step(k, chain.StepInputs(table.mean_numbers[k], scale, x[:1], x[:1], None))
        assert live.peak < work[HEAD] < 3 * live.peak
