"""LazyMAR's choice of rows with expected values by hand."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.lazymar import computed_ratio, lazymar
from fastar_nodes.samplers.mar.settings import LazyMARSettings
from fastar_nodes.samplers.noise import PairedNoise
from tiny_models import tiny_mar

FEW = {"ar_steps": 6, "diffusion_steps": 2, "cfg": 1.0, "refresh_period": 20, "start_step": 1}


def run(model, **changes):
    return finish(lazymar(model, from_ids((1,)), LazyMARSettings(**{**FEW, **changes}), PairedNoise(5, (0,))))


@pytest.mark.parametrize(("depth", "block"), [(4, 2), (8, 3), (11, 3), (20, 4)])
def test_block_0_is_the_paper_s_fourth_or_the_one_after_a_quarter_of_the_decoder(depth, block):
    """Blocks 4, 4 and 4 of MAR-B, -L and -H, which have 12, 16 and 20."""
    model = tiny_mar(3, decoder_depth=depth)
    automatic = run(model).latents
    assert torch.equal(automatic, run(model, block=block).latents)
    for other in {block - 1, block + 1} - {depth}:  # the last block leaves nothing out
        assert not torch.equal(automatic, run(model, block=other).latents)


@pytest.mark.parametrize(
    ("step", "end", "ratio"),
    [
        # The published table at 64 AR steps.
        (0, 0.05, 1.0),
        (19, 0.05, 1.0),
        (20, 0.05, 0.6),
        (24, 0.05, 0.5),
        (29, 0.05, 0.4),
        (34, 0.05, 0.15),
        (39, 0.05, 0.12),
        (40, 0.05, 0.05),
        (63, 0.05, 0.05),
        (19.5, 0.05, 0.8),  # between two entries
        # Another share at the end: 1 - (1 - end) (1 - ratio) / 0.95.
        (40, 0.5, 0.5),
        (20, 0.24, 0.68),
        (20, 1.0, 1.0),
    ],
)
def test_the_share_of_computed_rows(step, end, ratio):
    assert computed_ratio(step / 64, end) == pytest.approx(ratio, abs=1e-9)


def test_rows_that_did_not_change_are_left_out_from_the_last_position_on():
    """Their cosines differ from 1 by rounding only, which must not order them: they are ties, and the lower row comes first.

    Without attention between the rows, decoder rows change only where the decoder's input does: at tokens decided since the
    last call, which are computed anyway, and at the 2 class rows.
    """
    model = tiny_mar(3, decoder_depth=4)
    net = copy.deepcopy(model.net)
    for block in net.decoder_blocks:
        block.attn.proj.weight.zero_()
    report = run(
        dataclasses.replace(model, net=net),
        order="raster",
        ar_steps=16,
        start_step=10,
        refresh_period=6,
        computed_ratio=0.5,
    ).report
    # AR step s decides position s. Steps 0 to 10 compute all 18 rows, steps 11 to 15 half of them: the token decided now,
    # the one decided last, the 2 class rows, and 5 further ones, positions 0 to 4. The others come from the cache.
    cached = torch.zeros(16, dtype=torch.int32)
    for s in range(11, 16):
        left_out = torch.ones(16, dtype=torch.int32)
        left_out[[s, s - 1, 0, 1, 2, 3, 4]] = 0
        cached += left_out
    assert report.maps["cached"].flatten().tolist() == cached.tolist()


def test_only_blocks_before_the_last_leave_rows_out():
    model = tiny_mar(3, decoder_depth=4)
    assert [run(model, block=b).report.counts["cached_tokens"] > 0 for b in (1, 2, 3, 4)] == [True, True, True, False]
