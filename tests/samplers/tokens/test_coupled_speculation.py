"""SCD's passes beside those of *parallel* on the demo, and SCD's distribution.

``python -m pytest -m "" -s tests/samplers/tokens/test_coupled_speculation.py`` prints the passes that docs/papers.md
has.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from coupled_speculation import coupled_decoding, distributions
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from tokens_reference import tiny_gpt

pytestmark = pytest.mark.slow

IMAGES = 10
SETTINGS = LlamaGenSettings(cfg=1.5, top_k=0, top_p=0.8)


def test_the_demo_takes_as_many_passes_as_parallel(root: Path):
    """Within 40 % of each other, and below half of serial decoding's; 10 images, one of each class."""
    model = load_llamagen(root / "demo" / "checkpoints" / "llamagen.safetensors", "auto", torch.device("cpu"))
    ours = dataclasses.replace(SETTINGS, parallel=model.grid)
    made = finish(llamagen(model, from_ids(range(IMAGES)), ours, PairedDraws(77, range(IMAGES))))
    parallel = float((made.report.maps["step"].max(axis=(1, 2)) + 1).mean())
    passes = [coupled_decoding(model, label, SETTINGS, model.grid, 77 + label)[1] for label in range(IMAGES)]
    coupled = sum(passes) / IMAGES

    print(f"\npasses of {model.tokens}, window {model.grid}: SCD {coupled:.1f}, parallel {parallel:.1f}")
    assert max(coupled, parallel) < model.tokens / 2
    assert 0.6 < coupled / parallel < 1.67


def test_a_window_of_one_is_serial_decoding():
    model = tiny_gpt()
    assert coupled_decoding(model, 1, SETTINGS, 1, 0)[1] == model.tokens


def test_the_distribution_is_that_of_serial_decoding():
    """The marginal of the second cell, in windows of three: chi-square over 23 values, 1,500 images, p above 0.001. At
    this size a distribution without the resampling of step 3 is refused.
    """
    model = tiny_gpt(grid=2)
    settings = LlamaGenSettings(cfg=1.5, top_k=0, top_p=1.0)
    first = distributions(model, 1, torch.empty(0, dtype=torch.int64), settings)[0]
    second = torch.stack([distributions(model, 1, torch.tensor([token]), settings)[1] for token in range(len(first))])
    wanted = (first[:, None] * second).sum(0).double()

    drawn = [int(coupled_decoding(model, 1, settings, 3, seed)[0][1]) for seed in range(1500)]
    found = torch.bincount(torch.tensor(drawn), minlength=len(first))
    often = wanted > 5 / 1500
    rest = (1500 - int(found[often].sum()), 1 - float(wanted[often].sum()))
    counts = torch.tensor([*found[often].tolist(), rest[0]], dtype=torch.float64)
    expected = 1500 * torch.tensor([*wanted[often].tolist(), rest[1]], dtype=torch.float64)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), chi_square / 2)
    assert p_value > 0.001
