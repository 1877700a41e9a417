"""The cached loop against the slow reference, settings at which methods agree, and published settings."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import test_token_contract as contract
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.runs.memory.tokens import estimate
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens import par as par_module
from fastar_nodes.samplers.tokens.cache_slots import serial_slots
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.par import ADJACENT, NON_LOCAL, PARSettings, ablation_schedule, par, par_schedule
from fastar_nodes.samplers.tokens.schedule import raster
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, published, sampling_of
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from fastar_nodes.samplers.tokens.zipar import ZipARSettings, zipar, zipar_schedule
from small_settings import TOKENS
from test_token_contract import FEW, PLAIN
from test_token_contract import TRAINED as PAR_MODEL
from tokens_reference import condition_of, decided_at, reference_codes, tiny_gpt

DRAWS = TokenNoise(5, (0, 1, 2))
# Cases of the contract to the schedule that they and those with a longer name follow; others follow their settings'.
SCHEDULES = {
    "llamagen": raster(4),
    "par": par_schedule(4, 4),
    "par, at once": par_schedule(4, 4, False),
    "par, non-local": ablation_schedule(4, 4, False, True),
    "par, adjacent": ablation_schedule(4, 4, True, True),
    "par, adjacent, at once": ablation_schedule(4, 4, True, False),
    "zipar": zipar_schedule(4, 2),
    "zipar, by entropy": zipar_schedule(4, 1),
    "zipar, guided at first": zipar_schedule(4, 1),
    "zipar, grouped heads": zipar_schedule(4, 3),
}
# Drafts have a reference of their own, in test_mulosd.py.
_BY_SCHEDULE = [name for name in TOKENS if not SAMPLERS[name].needs_draft]
CASES = [case for case in contract.CASES if case.partition(",")[0] in _BY_SCHEDULE and "blanks" not in case]


def run(case, **changes):
    return finish(contract.start(case, **changes))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cases(*_BY_SCHEDULE, "llamagen, text", "llamagen, guided at first", "par, adjacent, at once")
def test_equals_the_slow_reference_in_the_passes_of_its_schedule(case):
    _, model, chosen = contract.CASES[case]
    known = [name for name in SCHEDULES if case.startswith(name)]
    schedule = SCHEDULES[max(known, key=len)] if known else chosen.schedule(model)
    result, c = contract.whole(case)[1], model.net.config
    slow = reference_codes(model, condition_of(c.condition), chosen, DRAWS, schedule.passes)
    assert torch.equal(result.latents, slow)
    report = result.report
    assert report.counts["transformer_passes"] == len(schedule.passes)
    prefix = {"class": 1, "text": 7, "features": 4}[c.condition]
    slots = prefix + serial_slots(schedule).count_without_padding
    guided = [
        chosen.cfg > 1 and (chosen.cfg_interval is None or p.cfg_step <= chosen.cfg_interval) for p in schedule.passes
    ]
    halves = [2 if any(guided[k:]) else 1 for k in range(len(guided))]  # the null half runs as long as it is needed
    rows = [prefix, *(len(p.fed_rows) for p in schedule.passes[1:])]
    assert report.counts["transformer_tokens"] == 3 * sum(h * r for h, r in zip(halves, rows, strict=True))
    assert report.counts["cache_bytes"] == 3 * halves[0] * c.depth * 2 * c.kv_heads * c.head_dim * slots * 4
    assert report.counts["cache_bytes"] < estimate(model, condition_of(c.condition), chosen)
    by_cell = decided_at(schedule)[:-1].reshape(4, 4)
    assert np.array_equal(report.maps["step"], np.broadcast_to(by_cell, (3, 4, 4)))


def test_visible_unwritten_slots_change_the_tokens():
    assert not torch.equal(run("zipar, blanks").latents, run("zipar").latents)


def test_a_model_and_a_sampler_that_do_not_fit_say_so():
    for sampler, model, chosen, told in (
        (llamagen, PAR_MODEL, LlamaGenSettings(), "model: tiny"),
        (zipar, PAR_MODEL, ZipARSettings(), "model: tiny"),
        (par, PLAIN, PARSettings(), "grouping: tiny is a LlamaGen"),
        (par, PAR_MODEL, PARSettings(grouping=ADJACENT), "grouping: tiny is a PAR model"),
        (par, tiny_gpt(grid=5), PARSettings(grouping=NON_LOCAL), "grouping: 4 regions do not fit into a grid of 5 x 5"),
    ):
        with pytest.raises(UserError, match=f"^{told}"):
            next(sampler(model, from_ids((1,)), chosen, TokenNoise(1, (0,))))


def test_all_greedy_settings_draw_the_likeliest():
    plain = run("llamagen", top_k=1, top_p=1.0)
    for change in ({"temperature": 0.0}, {"top_k": 0, "top_p": 0.0}):
        assert torch.equal(run("llamagen", **{"top_k": 0, "top_p": 1.0, **change}).latents, plain.latents)
    assert torch.equal(run("llamagen", top_k=1, seed=77).latents, plain.latents)


def sized(dim: int, regions: int = 1, condition: str = "class") -> SimpleNamespace:
    config = SimpleNamespace(dim=dim, regions=regions, condition=condition, null=True)
    return SimpleNamespace(net=SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("model", "cfg", "top_k"),
    [
        (sized(768), 4.0, 2000),
        (sized(1280), 4.0, 2000),
        (sized(1280, condition="text"), 7.5, 1000),
        (sized(1536, condition="features"), 4.0, 0),
        (sized(1280, 4), 1.5, 0),
        (sized(1536, 4), 1.435, 0),
        (sized(3200, 4), 1.345, 0),
        (sized(3200, 16), 1.5, 0),
    ],
    ids=str,
)
def test_cfg_zero_and_top_k_minus_one_take_the_published_values(model, cfg, top_k):
    assert published(model) == {"cfg": cfg, "top_k": top_k}
    own = sampling_of(LlamaGenSettings(), model)
    assert (own.cfg, own.top_k, own.uses_guidance, own.cfg_interval) == (cfg, top_k, cfg > 1, math.inf)
    stated = sampling_of(LlamaGenSettings(cfg=1.0, top_k=3, cfg_interval=5), model)
    assert (stated.cfg, stated.top_k, stated.uses_guidance, stated.cfg_interval) == (1.0, 3, False, 5)


def test_a_report_states_the_values_that_were_taken():
    report = finish(llamagen(PLAIN, from_ids((1,)), LlamaGenSettings(), TokenNoise(1, (0,)))).report
    assert report.settings["cfg"] == 4.0 and report.settings["top_k"] == 2000


@pytest.mark.parametrize(
    ("sampler", "chosen", "exact"),
    [
        (llamagen, LlamaGenSettings(**FEW, parallel=3), True),
        (zipar, ZipARSettings(**FEW, window=4), True),
        (zipar, ZipARSettings(**FEW, window=3), False),
        (llamagen, LlamaGenSettings(**FEW, cfg_interval=1000), True),
        (par, PARSettings(**FEW, grouping=NON_LOCAL), False),
    ],
    ids=str,
)
def test_exact_settings_give_the_tokens_of_llamagen(sampler, chosen, exact):
    assert chosen.exact(4) is exact and not chosen.lossless()
    found = finish(sampler(PLAIN, condition_of("class"), chosen, DRAWS)).latents
    assert torch.equal(found, run("llamagen").latents) is exact


@pytest.mark.parametrize(("kind", "name"), [("class", "llamagen"), ("text", "llamagen"), ("features", "tar")])
def test_reports_of_a_detokenizer_have_a_name_of_their_own(kind, name):
    settings = LlamaGenSettings(**FEW)
    done = finish(llamagen(tiny_gpt(kind, grid=2), condition_of(kind, (0,)), settings, TokenNoise(5, (0,))))
    assert done.report.sampler == name


@pytest.mark.parametrize(("grouping", "start"), [(ADJACENT, False), (NON_LOCAL, True)])
def test_groups_of_one_token_give_the_tokens_of_llamagen(monkeypatch, grouping, start):
    monkeypatch.setattr(par_module, "ABLATION_GROUP", 1)
    chosen = PARSettings(**FEW, grouping=grouping, sequential_start=start)
    found = finish(par(PLAIN, condition_of("class"), chosen, DRAWS)).latents
    assert torch.equal(found, run("llamagen").latents)


def test_a_group_may_be_the_whole_image(monkeypatch):
    monkeypatch.setattr(par_module, "ABLATION_GROUP", 16)
    chosen = PARSettings(**FEW, grouping=ADJACENT, sequential_start=False)
    whole = finish(par(PLAIN, from_ids((1,)), chosen, TokenNoise(1, (0,))))
    assert not whole.report.maps["step"].any() and whole.report.counts["transformer_passes"] == 1


@pytest.mark.parametrize("grouping", [ADJACENT, NON_LOCAL])
def test_an_ablation_of_par_is_refused_on_a_detokenizer(grouping):
    """Called directly too, not only by what calls its check first."""
    settings = PARSettings(**FEW, grouping=grouping)
    with pytest.raises(UserError, match=r"^model: tiny is a Tar de-tokenizer"):
        next(par(tiny_gpt("features"), condition_of("features", (0,)), settings, TokenNoise(1, (0,))))
