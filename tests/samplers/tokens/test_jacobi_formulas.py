"""Which tokens Jacobi decoding counts as accepted guesses."""

from __future__ import annotations

import pytest
import torch
from fastar_nodes.reports.record import PLAIN
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from tokens_reference import condition_of, tiny_gpt


@pytest.mark.parametrize("parallel", [4, 16])
def test_every_call_decides_one_token_without_a_guess(parallel):
    """The first position of a call's window is certain; the others that the call decides are accepted guesses."""
    few = LlamaGenSettings(temperature=0.1, parallel=parallel)
    report = finish(llamagen(tiny_gpt(), condition_of("class"), few, PairedDraws(5, (0, 1, 2)))).report
    step, outcome = report.maps["step"].reshape(3, -1), report.maps["outcome"].reshape(3, -1)
    assert report.counts["accepted"] > 0 and (step == 1).sum() > 3, "the first call must accept a guess"
    for image in range(3):
        assert sorted(step[image][outcome[image] == PLAIN]) == sorted(set(step[image]))


@pytest.mark.parametrize("cfg_interval", [0, 5, -1])
def test_a_window_guides_the_same_tokens_as_serial_decoding(cfg_interval):
    few = {"cfg": 3.0, "temperature": 0.5, "cfg_interval": cfg_interval}
    draws, condition = PairedDraws(5, (0, 1, 2)), condition_of("class")
    serial, windowed = (
        finish(llamagen(tiny_gpt(), condition, LlamaGenSettings(**few, parallel=n), draws)).codes for n in (0, 4)
    )
    assert torch.equal(serial, windowed)
