"""Operations of LazyMAR beside those that its paper states (Tables 1 to 3), from shapes alone.

The paper does not say what it counts: its plain MAR has 6 to 7 % more operations than the products of the network. All
figures here are therefore shares of plain MAR with 64 AR steps.
"""

from dataclasses import asdict

import pytest
from fastar_nodes.lab.work.operations import counted
from fastar_nodes.model_loaders.catalogue.official import official
from fastar_nodes.runs import presets
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.mar.lazy import lazymar
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings, LazyMARSettings
from fastar_nodes.samplers.noise import PairedNoise
from mar_flops import flops
from tiny_models import tiny_mar

PLAIN = LazyMARSettings(refresh_period=1)
SHORT = {"steps": 32, "start_step": 4, "refresh_period": 5}


def share(size: str, **changes) -> float:
    c = official(size)
    return flops(c, LazyMARSettings(**changes), published=True) / flops(c, PLAIN, published=True)


# Table 1: model, plain MAR's 64 AR steps, and LazyMAR's 64 and 32.
TABLE_1 = [("MAR-B", 15.49, 5.54, 4.10), ("MAR-L", 35.05, 12.52, 9.41), ("MAR-H", 69.06, 24.38, 19.03)]


@pytest.mark.parametrize(("size", "plain", "long", "short"), TABLE_1)
def test_the_default_settings_have_the_papers_operations(size, plain, long, short):
    """Within 3 %, at the paper's two numbers of AR steps."""
    assert plain * share(size) == pytest.approx(long, rel=0.03)
    assert plain * share(size, **SHORT) == pytest.approx(short, rel=0.03)


@pytest.mark.parametrize(("size", "width"), [("MAR-B", 768), ("MAR-L", 1024), ("MAR-H", 1280)])
def test_balanced_at_full_size_is_the_papers_configuration(size, width):
    """The paper has 2.80 times fewer operations for MAR-B and L, 2.83 for MAR-H, and 3.63 to 3.78 with 32 AR steps."""
    c = official(size)
    for steps, speedup in ((64, 2.8), (32, 3.7)):
        s = LazyMARSettings(steps=steps, **presets.values(CacheSettings, "balanced", False, width, steps))
        assert 1 / share(size, **asdict(s)) == pytest.approx(speedup, rel=0.06)
        assert flops(c, PLAIN) / flops(c, s) > speedup, "ours leaves out what nothing reads"
    demo = presets.values(CacheSettings, "balanced", True)
    periods = s.refresh_period, s.start_step
    assert (demo["refresh_period"], demo["start_step"]) == periods, "the demo has those of 32 AR steps"


def test_our_own_operations_are_fewer():
    """Of what the authors' code computes, ours leaves out what nothing reads: within 7 % of the paper's figures."""
    for size, plain, long, short in TABLE_1:
        c = official(size)
        one = plain / flops(c, PLAIN)
        assert 0.93 * long < one * flops(c, LazyMARSettings()) < 0.97 * long
        assert 0.92 * short < one * flops(c, LazyMARSettings(**SHORT)) < 0.97 * short


# Of MAR-H with 64 AR steps: the paper's figure, how close ours is, and the settings in lab/papers/lazymar.toml.
ABLATIONS = {
    "token cache": (44.21, 0.04, {"condition_cache": False, "head_cache": False}),
    "condition cache": (36.80, 0.02, {"token_cache": False, "encoder_cache": False}),
    "I": (22.60, 0.08, {"selection": "decided"}),
    "II": (24.94, 0.06, {"selection": "undecided"}),
    "III": (24.38, 0.03, {"selection": "random"}),
    "IV": (24.38, 0.03, {"selection": "most-similar"}),
}


@pytest.mark.parametrize("row", ABLATIONS)
def test_the_rows_of_tables_2_and_3_have_the_papers_operations(row):
    figure, tolerance, changes = ABLATIONS[row]
    assert 69.06 * share("MAR-H", **changes) == pytest.approx(figure, rel=tolerance)


def beyond_the_shapes(**changes) -> tuple[int, int]:
    """Operations of a run that the shapes do not count, and those that they do."""
    model = tiny_mar(1, dim=96, head_width=96, tokens=64, buffer=16, encoder_depth=4, decoder_depth=8, head_depth=6)
    values = {"steps": 24, "diffusion_steps": 15, "t_max": 999, "start_step": 3, "refresh_period": 4, **changes}
    s = LazyMARSettings(**values)
    with counted() as work:
        finish(lazymar(model, from_ids((1,)), s, PairedNoise(1, (0,))))
    in_shapes = flops(model.net.config, s)
    return work.flops - in_shapes, in_shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"refresh_period": 1}, {"condition_cache": False}, {"token_cache": False, "encoder_cache": False}],
    ids=str,
)
def test_the_shapes_count_what_a_run_computes(changes):
    """But for embeddings, less than 4 % here."""
    embeddings, products = beyond_the_shapes(**changes)
    assert 0 < embeddings < 0.04 * products


@pytest.mark.slow
def test_the_shapes_count_the_rows_of_every_choice_of_tokens():
    """The rest of a run does not depend on the choice, to a single operation."""
    choices = [
        {"selection": "decided"},
        {"selection": "undecided"},
        {"ratio_schedule": "constant", "computed_ratio": 0.3},
    ]
    rest, products = beyond_the_shapes()
    for changes in choices:
        other, fewer = beyond_the_shapes(**changes)
        assert other == rest and fewer < products
