"""Estimated working memory of the token samplers, computed by hand.

A tiny model in fp32 (width 16, inner width 24, 2 blocks of 2 heads of 8, 23 codes) keeps 2 x 2 x 2 x 8 numbers, 256
bytes, of every row; a fed row takes 8 x 16 + 3 x 24 numbers, 800 bytes, and twice as many rows are counted as cells are
decided; a decided cell takes 23 logits of 4 bytes, 10 times with guidance and 9 times without.
"""

import pytest
import test_token_contract as tokens
from fastar_nodes.runs.drawing import Drawing
from fastar_nodes.runs.memory.tokens import estimate
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.mulosd.drafting import PixelUpSampling
from fastar_nodes.samplers.tokens.mulosd.settings import MuLoSDSettings
from fastar_nodes.samplers.tokens.par import ADJACENT, PARSettings
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.zipar import ZipARSettings
from tiny_tokens import other_vocabulary
from tokens_reference import condition_of, tiny_gpt

# 3 images with guidance behind one condition row, on a grid of 4 x 4: cache, fed rows and logits.
CACHE, ROW, CELL = 256 * 2 * 3 * (1 + 16), 800 * 2 * 3, 4 * 23 * 3 * 10


@pytest.mark.parametrize(
    ("settings", "cells", "further"),
    [
        (LlamaGenSettings(cfg=2.0), 1, 0),
        (LlamaGenSettings(cfg=2.0, parallel=5), 5, 0),
        (LlamaGenSettings(cfg=2.0, parallel=40), 16, 0),
        (ZipARSettings(cfg=2.0, window=3), 2, 0),
        (ZipARSettings(cfg=2.0, window=3, parallel=1), 2, 2),
        (PARSettings(cfg=2.0, grouping=ADJACENT), 4, 0),
    ],
    ids=["one by one", "window", "window of all", "zipar", "zipar in windows", "par"],
)
def test_a_pass_is_as_large_as_the_cells_that_it_decides(settings, cells, further):
    """In windows, stand-ins have slots of their own, of ZipAR the first tokens of rows 3 and 4."""
    cache = CACHE + 256 * 2 * 3 * further
    assert estimate(tiny_gpt(), condition_of("class"), settings) == cache + ROW * 2 * cells + CELL * cells


@pytest.mark.parametrize(
    ("settings", "cells", "further"),
    [
        (LlamaGenSettings(cfg=2.0), 1, 0),
        (LlamaGenSettings(cfg=2.0, parallel=1), 32, 0),
        (LlamaGenSettings(cfg=2.0, parallel=40), 64, 0),
        (ZipARSettings(cfg=2.0, window=2, parallel=9), 32, 4),
        (ZipARSettings(cfg=2.0, window=1, parallel=1), 32, 4),
        (ZipARSettings(cfg=2.0, window=1, parallel=16), 64, 4),
    ],
    ids=["one by one", "window of 1", "window of all", "zipar of 3 cells", "zipar of 5 cells", "zipar of all cells"],
)
def test_windows_of_16_bits_are_padded(settings, cells, further):
    """To a multiple of 32: 1, 6 x 6, 9 passes of 3 cells, 6 passes (the side) of 5 cells, as the first row is complete
    before the others begin, and all 16 passes. Cache and rows have half the bytes, logits are fp32. ZipAR's rows 3 to 6
    begin with a stand-in.
    """
    model = tiny_gpt(grid=6)
    model.net.bfloat16()
    found = estimate(model, condition_of("class"), settings)
    assert found == 128 * 2 * 3 * (1 + 36 + further) + ROW // 2 * 2 * cells + CELL * cells


def test_without_guidance_there_is_one_branch():
    found = estimate(tiny_gpt(), condition_of("class"), LlamaGenSettings(cfg=1.0))
    assert found == CACHE // 2 + ROW // 2 * 2 + 4 * 23 * 3 * 9


def test_the_prefix_is_the_longest_condition():
    """Texts of 3, 7 and 1 rows."""
    found = estimate(tiny_gpt("text"), condition_of("text"), LlamaGenSettings(cfg=2.0))
    assert found == 256 * 2 * 3 * (7 + 16) + ROW * 7 + CELL


@pytest.mark.parametrize(("grid", "parallel", "drafted"), [(6, 0, 3), (6, 2, 6), (6, 4, 9), (9, 0, 3), (64, 0, 3)])
def test_mulosd_verifies_a_picture_and_drafts_rows(grid, parallel, drafted):
    """The target judges its cells in one pass, and all of them at once. A column of the draft's 3 x 3, or of a window
    each, with a stand-in for every row. The neighbour table holds 23 x (1 + 5) numbers; before its pieces are joined
    there are scores of 23 x 23 pairs, as many values and twice as large indices.
    """
    settings = MuLoSDSettings(cfg=2.0, draft_parallel=parallel, neighbours=5)
    verifying = 256 * 2 * 3 * (1 + grid**2) + ROW * (1 + grid**2) + CELL * grid**2
    drafting = 256 * 2 * 3 * (1 + 9 + 3) + ROW * 2 * drafted + CELL * drafted
    found = estimate(tiny_gpt(grid=grid), condition_of("class"), settings, tiny_gpt(grid=3))
    assert found == verifying + drafting + 4 * (23 * 6 + 4 * 23 * 23)


def test_mulosd_computes_logits_in_pieces_of_64_mb():
    """Of 40,000 codes and two branches of three images 2^24 / 240,000 = 69.9 cells at once; of the neighbour table 2^24
    / 40,000 = 419.4 codes.
    """
    settings = MuLoSDSettings(cfg=2.0, neighbours=5)
    target, draft = (other_vocabulary(tiny_gpt(grid=grid), 40_000) for grid in (9, 3))
    cell = 4 * 40_000 * 3 * 10
    verifying = 256 * 2 * 3 * (1 + 81) + ROW * (1 + 81) + cell * 69
    drafting = 256 * 2 * 3 * (1 + 9 + 3) + ROW * 2 * 3 + cell * 3
    found = estimate(target, condition_of("class"), settings, draft)
    assert found == verifying + drafting + 4 * (40_000 * 6 + 4 * 419 * 40_000)


# ------------------------------------------------------------------------------------------------ reports


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llamagen", LlamaGenSettings(cfg=2.0)),
        ("par", PARSettings(cfg=2.0, grouping=ADJACENT)),
        ("zipar", ZipARSettings(cfg=2.0, window=3)),
    ],
    ids=["llamagen", "par", "zipar"],
)
def test_reports_hold_the_estimate(name, settings):
    model, condition = tiny_gpt(), condition_of("class")
    report = finish(Drawing(SAMPLERS[name], model, settings, condition, 1, range(3)).steps()).report
    weights = sum(weight.nbytes for weight in model.net.parameters())
    need = estimate(model, condition, settings)
    assert report.memory == {"weights: transformer": weights, "sampling": need}
    assert report.to_dict()["memory_estimate_bytes"] == report.memory


def test_a_report_of_mulosd_holds_both_models():
    target, draft = tiny_gpt(grid=6), tiny_gpt(grid=3)
    settings = MuLoSDSettings(cfg=2.0, neighbours=5)
    condition = condition_of("class")
    more = {"draft": draft, "up_sampler": PixelUpSampling(tokens.VQ)}
    drawing = Drawing(SAMPLERS["mulosd"], target, settings, condition, 1, range(3), **more)
    memory = finish(drawing.steps()).report.memory
    assert list(memory) == ["weights: transformer", "weights: draft transformer", "sampling"]
    assert memory["sampling"] == int(estimate(target, condition, settings, draft))
