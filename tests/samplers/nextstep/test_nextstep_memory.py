"""The memory of a NextStep: numbers by hand, whole runs of a tiny one, and four layers of a 14B on the meta device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fastar_nodes.model_loaders.catalogue.official import official_nextstep
from fastar_nodes.networks.nextstep import Marks, NextStep, NextStepModel
from fastar_nodes.reports.record import Report
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.families import nextstep as memory
from fastar_nodes.runs.memory import HEAD, KV_CACHE, NOISE, POSITIONS, TRANSFORMER, WEIGHTS, total
from fastar_nodes.runs.registry import FAMILIES, SAMPLERS
from fastar_nodes.samplers import chain, diffusion_steps
from fastar_nodes.samplers.chain import MODULATION_BUDGET
from fastar_nodes.samplers.conditioning import ImagePromptCondition, PromptCondition
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.nextstep.flow import flow
from fastar_nodes.samplers.nextstep.settings import NextStepSettings
from fastar_nodes.samplers.noise import CounterRNG
from fastar_nodes.samplers.speculation import Speculation
from live_bytes import LiveBytes, counted
from nextstep_models import EDITOR, PROMPTS, edits_of, tiny_nextstep

FEW = NextStepSettings(diffusion_steps=4, cfg=2.0)
estimate = FAMILIES["nextstep"].memory


def guided(settings: NextStepSettings, branches: int) -> NextStepSettings:
    return replace(settings, cfg=1.0 if branches == 1 else 2.0, cfg_img=1.5 if branches == 3 else 1.0)


def test_a_run_by_hand():
    """Two images with guidance are 4 rows; of 9 tokens of 16 numbers, behind a prompt of 4 ids and 16 for the marks."""
    model = tiny_nextstep()
    condition = PromptCondition(("a boat", "a boat"))
    prefix = len(model.prompt("a boat")) + 16
    found = estimate(model, condition, FEW)

    # Keys and values of 2 layers with 2 heads of 16 numbers, fp32.
    assert found[KV_CACHE] == 4 * (prefix + 9) * 2 * 2 * 2 * 16 * 4
    # RoPE: two numbers each of a head.
    assert found[POSITIONS] == 4 * 2 * (prefix + 9) * 16
    # Start noise, 4 steps, and one more; as drawn, and in the order of the tokens.
    assert found[NOISE] == 2 * 4 * 2 * 6 * 9 * 16
    # The head of width 48 with 3 blocks has 3 x 3 x 48 modulations, and 2 x 48 of its last layer.
    assert model.net.head.modulation_numbers == 11 * 48
    assert found[HEAD] == (3 * 4 * 11 * 48 * 4 + 8 * 4 * 48) * 4 + 4 * (8 + 2) * 2 * 16

    half = estimate(model, condition, replace(FEW, cfg=1.0))
    assert all(2 * half[name] == found[name] for name in (KV_CACHE, TRANSFORMER))
    # A pass has the prompts, of an edit all tokens if these are more: 9 are not.
    mask = 4 * prefix * 4 * (prefix + 9) * (1 + 2)
    assert estimate(model, condition, FEW, edited=True)[TRANSFORMER] == found[TRANSFORMER] + mask


def test_weights_are_counted_once_and_by_part():
    model = tiny_nextstep()
    whole = {id(weight) for weight in model.net.parameters()}
    of_parts = [id(weight) for part in model.parts.values() for weight in part.parameters()]
    assert len(of_parts) == len(set(of_parts)) and set(of_parts) == whole

    found = estimate(model, PromptCondition(("a boat",)), FEW)
    head = sum(weight.nbytes for weight in model.net.image_head.parameters())
    assert found[f"{WEIGHTS}head"] == head
    assert found[f"{WEIGHTS}transformer"] == sum(weight.nbytes for weight in model.net.parameters()) - head


# Images, branches of guidance, and whether a part of an image is sampled again.
RUNS = [(images, branches, edited) for images in (1, 3) for branches in (1, 2, 3) for edited in (False, True)]


@pytest.mark.parametrize(("images", "branches", "edited"), RUNS)
@pytest.mark.fast_cases("1-2-False", "3-3-False", "1-3-True")
def test_a_run_holds_what_is_estimated(images, branches, edited):
    """No less than what is alive, at most three times as much. An edit feeds all tokens but the last in one pass.

    Three branches change an image, whose negative text is longer than the text of one of them.
    """
    side = 16 if edited else 8
    model = tiny_nextstep(EDITOR, side)
    settings = guided(FEW, branches)
    which = tuple(range(images))
    condition = edits_of(which, side) if branches == 3 else PromptCondition(PROMPTS[:images])
    edit = None
    if edited:
        mask = torch.zeros(1, side, side)
        mask[:, -1, -1] = 1
        edit = Edit(torch.zeros(1, 4, 2 * side, 2 * side), mask)

    with LiveBytes() as live:
        report = finish(Drawing(SAMPLERS["nextstep"], model, settings, condition, 5, which, edit).steps()).report
    weights = sum(count for name, count in report.memory.items() if name.startswith(WEIGHTS))
    assert report.memory == estimate(model, condition, settings, edited)
    assert live.peak < total(report.memory) - weights < 3 * live.peak
    assert 0.5 * report.memory[KV_CACHE] < report.counts["cache_bytes"] <= report.memory[KV_CACHE]
    assert report.counts["head_rows"] == images * branches * 4 * (1 if edited else 64)


@torch.no_grad()
@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.fast_cases(1)
def test_a_window_holds_what_is_estimated(monkeypatch, branches):
    """Tokens of so many numbers that the states of a window decide, and a call for each state."""
    monkeypatch.setattr(memory, "MODULATION_BUDGET", 1)
    model = wide(dim=64, heads=2, kv_heads=1, hidden=64, vocab=400, token=512, head_width=64, head_depth=2)
    settings = guided(NextStepSettings(diffusion_steps=40, speculation=8), branches)
    work = estimate(model, condition_of(2, branches), settings)[HEAD]

    noise = torch.randn(40, 2, 512)
    start = torch.randn(2, 512)
    z = torch.randn(branches, 2, 64)
    scales = torch.full((2, 2 if branches == 3 else 1), 1.5)
    made = flow("em0", 40)
    times = model.net.head.times(torch.tensor(made.times))
    with LiveBytes() as live:
        rows = chain.DiffusionBatch(z, scales, start, noise, diffusion_steps.step_table(made.steps, times))
        head = chain.SpeculationHead(model.net, model.net.head, rows, a_report(), 1)
        paths = Speculation(model.net, head, rows, CounterRNG(torch.arange(2)), a_report())
        windows = paths.windows(np.arange(2), 8)
        for _ in range(3):
            next(windows)
    assert live.peak < work < 3 * live.peak


def a_report() -> Report:
    return Report("nextstep", "tiny", {}, 0, 1, "cpu", memory={})


def wide(**sizes) -> NextStepModel:
    """A layer of other sizes than the 14B's, in fp32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return named(NextStep(replace(official_nextstep(), depth=1, **sizes)))


def large(depth: int) -> NextStepModel:
    """Some layers of the 14B in bf16, without weights."""
    with torch.device("meta"):
        net = NextStep(replace(official_nextstep(), depth=depth)).to(torch.bfloat16)
    net.head.final_layer.linear.float()
    return named(net)


def named(net: NextStep) -> NextStepModel:
    """A model that edits, of a token a word; the ids of the marks do not matter."""
    marks = Marks(area=0, begin=0, end=0, place=0)
    net = net.eval().requires_grad_(False)
    return NextStepModel(net, EDITOR, 16, lambda text: [0] * len(text.split()), marks, side=32)


def condition_of(images: int, branches: int) -> PromptCondition | ImagePromptCondition:
    """Prompts of a hundred words, for three branches with images."""
    texts = ("word " * 100,) * images
    if branches < 3:
        return PromptCondition(texts)
    return ImagePromptCondition(texts, (torch.zeros(4, 4, 3, dtype=torch.uint8),) * images)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("images", [1, 3])
def test_passes_of_a_part_of_a_14b_hold_what_is_estimated(monkeypatch, images, branches):
    """Four layers of 48, at full width: no less than what is alive, and at most three times as much."""
    model = large(4)
    net = model.net
    settings = guided(NextStepSettings(), branches)
    condition = condition_of(images, branches)
    work, of_edit = (estimate(model, condition, settings, edited) for edited in (False, True))
    rows = images * branches
    prefix = 100 + 16 + (1024 if branches == 3 else 0)

    with torch.device("meta"):
        # Of an edit the prompts, or all tokens that it fixes, whichever are more.
        embedded = torch.empty(rows, prefix, 5120, dtype=torch.bfloat16)
        with counted(monkeypatch) as live:
            _, cache = net.begin(embedded, torch.full((rows,), prefix), 1024)
        kept = cache.bytes + cache.positions.table.nbytes
        assert cache.bytes == work[KV_CACHE] and cache.positions.table.nbytes == work[POSITIONS]
        assert live.peak - kept < work[TRANSFORMER] < 3 * (live.peak - kept)

        for tokens, about in ((1, work), (1023, of_edit)):
            values = torch.empty(rows, tokens, 64)
            with counted(monkeypatch) as live:
                net.advance(values, 0, cache)
            assert live.peak < about[TRANSFORMER]
        assert of_edit[TRANSFORMER] < 3 * live.peak

        made = flow("em0", 28)
        z = torch.empty(branches, images, 5120, dtype=torch.bfloat16)
        scales = torch.empty(images, 2 if branches == 3 else 1)
        noise = torch.empty(28, images, 64)
        with counted(monkeypatch) as live:
            table = diffusion_steps.StepTable(torch.empty(28, 8), net.head.times(torch.tensor(made.times)), False)
            batch = chain.DiffusionBatch(z, scales, noise[0], noise, table)
            for _ in chain.run_chain(batch, chain.FullChainHead(net, net.head, batch, a_report(), MODULATION_BUDGET)):
                pass
        assert live.peak < work[HEAD] < 3 * live.peak
