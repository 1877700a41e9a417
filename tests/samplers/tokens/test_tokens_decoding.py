"""The cached loop against the slow reference, and the requirements on every token sampler."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.conditioning import Condition, TextCondition, from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.registry import MAR, SAMPLERS
from fastar_nodes.samplers.tokens.draws import PairedDraws, allowed
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.loop import published, resolve
from fastar_nodes.samplers.tokens.par import ablation_schedule, par, par_schedule
from fastar_nodes.samplers.tokens.schedule import raster
from fastar_nodes.samplers.tokens.settings import ADJACENT, NON_LOCAL, LlamaGenSettings, PARSettings, ZipARSettings
from fastar_nodes.samplers.tokens.zipar import windowed, zipar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens_reference import condition_of, reference_codes, tiny_gpt
from torch.utils._python_dispatch import TorchDispatchMode

FEW = {"cfg": 2.5, "top_k": 8, "top_p": 0.9, "temperature": 0.9}
PLAIN, PAR_MODEL = tiny_gpt(), tiny_gpt(special=3, seed=1)
DRAWS = PairedDraws(5, (0, 1, 2))
# Name to sampler, model, settings and the schedule it should follow.
CASES = {
    "llamagen": (llamagen, PLAIN, LlamaGenSettings(**FEW), raster(4)),
    "llamagen, no guidance": (llamagen, PLAIN, LlamaGenSettings(**{**FEW, "cfg": 1.0}), raster(4)),
    "llamagen, guided at first": (llamagen, PLAIN, LlamaGenSettings(**FEW, cfg_interval=4), raster(4)),
    "llamagen, text": (llamagen, tiny_gpt("text"), LlamaGenSettings(**FEW), raster(4)),
    "llamagen, features, grouped heads": (llamagen, tiny_gpt("features"), LlamaGenSettings(**FEW), raster(4)),
    "par": (par, PAR_MODEL, PARSettings(**FEW), par_schedule(4, 4)),
    "par, guided at first": (par, PAR_MODEL, PARSettings(**FEW, cfg_interval=1), par_schedule(4, 4)),
    "par, text": (par, tiny_gpt("text", special=3), PARSettings(**FEW), par_schedule(4, 4)),
    "par, at once": (par, PAR_MODEL, PARSettings(**FEW, sequential_start=False), par_schedule(4, 4, False)),
    "par, non-local": (par, PLAIN, PARSettings(**FEW, grouping=NON_LOCAL), ablation_schedule(4, 4, False, True)),
    "par, adjacent": (par, PLAIN, PARSettings(**FEW, grouping=ADJACENT, group=3), ablation_schedule(4, 3, True, True)),
    "par, adjacent, at once": (
        par,
        tiny_gpt("features"),
        PARSettings(**FEW, grouping=ADJACENT, sequential_start=False),
        ablation_schedule(4, 4, True, False),
    ),
    "zipar": (zipar, PLAIN, ZipARSettings(**FEW, window=2), windowed(4, 2)),
    "zipar, guided at first": (zipar, PLAIN, ZipARSettings(**FEW, window=1, cfg_interval=2), windowed(4, 1)),
    "zipar, text": (zipar, tiny_gpt("text"), ZipARSettings(**FEW, window=2), windowed(4, 2)),
    "zipar, grouped heads": (zipar, tiny_gpt("class, grouped heads"), ZipARSettings(**FEW, window=3), windowed(4, 3)),
    "zipar, features": (zipar, tiny_gpt("features"), ZipARSettings(**FEW, window=2), windowed(4, 2)),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


def kind_of(model) -> str:
    return model.net.config.condition


def run(case, images=(0, 1, 2), seed=5, **changes):
    sampler, model, chosen, _ = case
    chosen = dataclasses.replace(chosen, **changes)
    return finish(sampler(model, condition_of(kind_of(model), images), chosen, PairedDraws(seed, images), seed))


def test_every_registered_sampler_is_here():
    # Those with a draft model have tests of their own.
    ours = [e for e in SAMPLERS.values() if e.family != MAR and not e.needs_draft]
    assert {entry.run for entry in ours} <= {sampler for sampler, *_ in CASES.values()}
    assert [entry.name for entry in ours if entry.baseline] == ["llamagen", "tar"]
    assert {type(chosen) for _, _, chosen, _ in CASES.values()} >= {entry.settings for entry in ours}


def test_equals_the_slow_reference(case):
    _, model, chosen, schedule = case
    slow = reference_codes(model, condition_of(kind_of(model)), chosen, DRAWS, schedule.passes)
    assert torch.equal(run(case).codes, slow)


def test_an_image_does_not_depend_on_its_batch(case):
    together = run(case)
    for i in range(3):
        alone = run(case, (i,))
        assert torch.equal(alone.codes[0], together.codes[i])
        assert np.array_equal(alone.report.maps["step"][0], together.report.maps["step"][i])


def test_same_seed_same_picture_another_seed_another(case):
    first = run(case)
    assert torch.equal(first.codes, run(case).codes) and first.report.counts == run(case).report.counts
    assert not torch.equal(first.codes, run(case, seed=6).codes)


def test_changes_no_global_state_and_never_waits_for_the_device(case):
    sampler, model, chosen, _ = case

    def state():
        return (
            torch.random.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
        )

    before, weights = state(), {k: v.clone() for k, v in model.net.state_dict().items()}
    steps = sampler(model, condition_of(kind_of(model)), chosen, DRAWS)
    step = next(steps)
    assert state() == before, "in the middle of a run"
    assert not step.codes.is_inference() and not step.decided.is_inference()

    class NoAnswers(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), (
                func
            )
            return func(*args, **(kwargs or {}))

    with NoAnswers():
        finish(steps)
    assert state() == before
    assert all(torch.equal(v, weights[k]) for k, v in model.net.state_dict().items())


def test_yields_every_pass_and_can_be_left_at_any(case):
    sampler, model, chosen, schedule = case
    seen = list(sampler(model, condition_of(kind_of(model)), chosen, DRAWS))
    assert [s.done for s in seen] == list(range(1, len(schedule.passes) + 1))
    for k, step in enumerate(seen):
        assert step.total == len(seen) and step.codes.shape == step.decided.shape == (3, 4, 4)
        expected = torch.from_numpy(schedule.fixed_at <= k).expand(3, -1, -1)
        assert torch.equal(step.decided, expected) and not step.codes[~expected].any()
    for earlier, later in zip(seen, seen[1:], strict=False):
        assert torch.equal(later.codes[earlier.decided], earlier.codes[earlier.decided]), "what is decided stays"
    left = sampler(model, condition_of(kind_of(model)), chosen, DRAWS)
    next(left)
    left.close()
    assert torch.equal(run(case).codes, seen[-1].codes)


def test_report_adds_up(case):
    _, model, chosen, schedule = case
    result = run(case)
    report, c = result.report, model.net.config
    assert result.codes.dtype == torch.int64 and 0 <= int(result.codes.min()) and int(result.codes.max()) < c.vocab
    assert report.counts["transformer_passes"] == len(schedule.passes)
    prefix = {"class": 1, "text": 7, "features": 4}[c.condition]
    slots = prefix + schedule.slots
    guided = [chosen.cfg > 1 and (chosen.cfg_interval < 0 or p.clock <= chosen.cfg_interval) for p in schedule.passes]
    halves = [2 if any(guided[k:]) else 1 for k in range(len(guided))]  # the null half runs as long as it is needed
    rows = [prefix, *(len(p.position) for p in schedule.passes[1:])]
    assert report.counts["transformer_tokens"] == 3 * sum(h * r for h, r in zip(halves, rows, strict=True))
    assert report.counts["cache_bytes"] == 3 * halves[0] * c.depth * 2 * c.kv_heads * c.head_dim * slots * 4
    most = model.cache_bytes(3, chosen.cfg > 1, prefix)
    assert report.counts["cache_bytes"] <= most <= 1.4 * report.counts["cache_bytes"]
    assert np.array_equal(report.maps["step"], np.broadcast_to(schedule.fixed_at, (3, 4, 4)))
    assert report.maps["outcome"].shape == (3, 4, 4) and not report.maps["outcome"].any()
    assert report.settings == dataclasses.asdict(chosen) and report.images == 3 and report.seed == 5
    assert report.seconds > 0 and sum(report.phases.values()) <= report.seconds * 1.05


def test_guidance_to_the_end_is_no_limit(case):
    assert torch.equal(run(case, cfg_interval=-1).codes, run(case, cfg_interval=1000).codes)


def test_wrong_input_says_so(case):
    sampler, model, chosen, _ = case
    what = condition_of(kind_of(model))
    with pytest.raises(UserError, match="condition: "):
        next(sampler(model, what, chosen, PairedDraws(1, (0,))))
    wrong = TextCondition((torch.zeros(2, 6),), ("",)) if kind_of(model) != "text" else from_ids((1,))
    with pytest.raises(UserError, match="condition: "):
        next(sampler(model, wrong, chosen, PairedDraws(1, (0,))))
    if kind_of(model) == "class":
        with pytest.raises(UserError, match="label 5 is outside the model's 0 to 4"):
            next(sampler(model, from_ids((5,)), chosen, PairedDraws(1, (0,))))
        with pytest.raises(UserError, match="holds no label"):
            next(sampler(model, Condition((), ()), chosen, PairedDraws(1, ())))


# ------------------------------------------------------------------------------------------------ where methods agree


@settings(deadline=None, max_examples=20)
@given(
    st.integers(4, 12),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1.0, 3.0]),
    st.sampled_from([-1, 0, 5]),
    st.booleans(),
)
def test_zipar_with_a_full_window_is_llamagen_token_for_token(window, seed, cfg, interval, masked):
    common = {"cfg": cfg, "cfg_interval": interval, "top_k": 0}
    draws = PairedDraws(seed, (0, 3))
    plain = finish(llamagen(PLAIN, from_ids((1, 2)), LlamaGenSettings(**common), draws))
    wide = finish(zipar(PLAIN, from_ids((1, 2)), ZipARSettings(**common, window=window, mask_undecoded=masked), draws))
    assert torch.equal(plain.codes, wide.codes) and plain.report.counts == wide.report.counts


def test_groups_of_one_are_llamagen():
    for grouping in (ADJACENT, NON_LOCAL):
        one = run((par, PLAIN, PARSettings(**FEW, grouping=grouping, group=1), None))
        assert torch.equal(one.codes, run(CASES["llamagen"]).codes)


def test_the_first_row_is_llamagens_whatever_the_window():
    for window in (1, 2, 3):
        assert torch.equal(run(CASES["zipar"], window=window).codes[:, 0], run(CASES["llamagen"]).codes[:, 0])


def test_visible_unwritten_slots_change_the_tokens():
    assert not torch.equal(run(CASES["zipar"], mask_undecoded=False).codes, run(CASES["zipar"]).codes)


def test_a_text_may_be_padded_by_its_neighbours_only():
    """The same tokens alone, where nothing is padded."""
    model, what = tiny_gpt("text"), condition_of("text")
    for i, features in enumerate(what.features):
        alone = finish(
            llamagen(model, TextCondition((features,), ("",)), LlamaGenSettings(**FEW), PairedDraws(5, (i,)))
        )
        assert torch.equal(alone.codes[0], run(CASES["llamagen, text"]).codes[i])


def test_a_model_and_a_sampler_that_do_not_fit_say_so():
    draws, what = PairedDraws(1, (0,)), from_ids((1,))
    for sampler, chosen in ((llamagen, LlamaGenSettings()), (zipar, ZipARSettings())):
        with pytest.raises(UserError, match="model: tiny was trained in PAR's order"):
            next(sampler(PAR_MODEL, what, chosen, draws))
    with pytest.raises(UserError, match="grouping: tiny is a plain LlamaGen"):
        next(par(PLAIN, what, PARSettings(), draws))
    with pytest.raises(UserError, match="grouping: tiny was trained for its own groups"):
        next(par(PAR_MODEL, what, PARSettings(grouping=ADJACENT), draws))
    with pytest.raises(UserError, match="group: 17 is more than the picture's 16 tokens"):
        next(par(PLAIN, what, PARSettings(grouping=ADJACENT, group=17), draws))
    with pytest.raises(UserError, match="group: 9 regions do not tile"):
        next(par(PLAIN, what, PARSettings(grouping=NON_LOCAL, group=9), draws))


# ------------------------------------------------------------------------------------------------ drawing a token


def test_ties_of_the_last_allowed_value_stay():
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 0.0])
    assert allowed(logits, 2, 1.0).isfinite().tolist() == [True, False, True, True, False]
    assert torch.equal(allowed(logits, 0, 1.0), logits) and torch.equal(allowed(logits, 99, 1.0), logits)


def test_the_value_that_crosses_top_p_stays():
    logits = torch.tensor([0.1, 0.5, 0.4]).log()
    assert allowed(logits, 0, 0.45).isfinite().tolist() == [False, True, False]
    assert allowed(logits, 0, 0.55).isfinite().tolist() == [False, True, True]
    assert allowed(logits, 0, 0.0).isfinite().tolist() == [False, True, False]
    assert allowed(logits, 0, 1.0).isfinite().all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(0, 14), st.floats(0, 1), st.integers(0, 2**32))
def test_something_is_always_allowed_and_only_the_likeliest(values, top_k, top_p, seed):
    logits = torch.randn(2, values, generator=torch.Generator().manual_seed(seed))
    kept = allowed(logits, top_k, top_p).isfinite()
    for row, keep in zip(logits, kept, strict=True):
        assert keep.any() and (not top_k or int(keep.sum()) <= max(top_k, 1) or len(row.unique()) < values)
        if not keep.all():
            assert row[keep].min() >= row[~keep].max()


def test_all_greedy_settings_draw_the_likeliest():
    plain = run(CASES["llamagen"], top_k=1, top_p=1.0)
    for change in ({"temperature": 0.0}, {"top_k": 0, "top_p": 0.0}):
        assert torch.equal(run(CASES["llamagen"], **{"top_k": 0, "top_p": 1.0, **change}).codes, plain.codes)
    assert torch.equal(run(CASES["llamagen"], top_k=1, seed=77).codes, plain.codes)


# ------------------------------------------------------------------------------------------------ published settings


def sized(dim: int, regions: int = 1, condition: str = "class") -> SimpleNamespace:
    config = SimpleNamespace(dim=dim, regions=regions, condition=condition)
    return SimpleNamespace(net=SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("model", "cfg", "top_k"),
    [
        (sized(768), 4.0, 2000),
        (sized(1280), 4.0, 2000),
        (sized(1280, condition="text"), 7.5, 1000),
        (sized(1536, condition="features"), 4.0, 0),
        (sized(1536, condition="codes"), 4.0, 0),
        (sized(1280, 4), 1.5, 0),
        (sized(1536, 4), 1.435, 0),
        (sized(3200, 4), 1.345, 0),
        (sized(3200, 16), 1.5, 0),
    ],
    ids=str,
)
def test_cfg_zero_and_top_k_minus_one_take_the_published_values(model, cfg, top_k):
    assert published(model) == {"cfg": cfg, "top_k": top_k}
    own = resolve(LlamaGenSettings(), model)
    assert (own.cfg, own.top_k) == (cfg, top_k)
    assert resolve(LlamaGenSettings(cfg=1.0, top_k=0), model) == LlamaGenSettings(cfg=1.0, top_k=0)


def test_a_report_states_the_values_that_were_taken():
    report = finish(llamagen(PLAIN, from_ids((1,)), LlamaGenSettings(), PairedDraws(1, (0,)))).report
    assert report.settings["cfg"] == 4.0 and report.settings["top_k"] == 2000


# ------------------------------------------------------------------------------------------------ what settings claim


@pytest.mark.parametrize(
    ("sampler", "chosen", "exact"),
    [
        (llamagen, LlamaGenSettings(**FEW, parallel=3), True),
        (zipar, ZipARSettings(**FEW, window=4, mask_undecoded=False), True),
        (zipar, ZipARSettings(**FEW, window=3), False),
        (par, PARSettings(**FEW, grouping=ADJACENT, group=1, sequential_start=False), True),
        (par, PARSettings(**FEW, grouping=NON_LOCAL), False),
    ],
    ids=str,
)
def test_exact_settings_give_the_tokens_of_llamagen(sampler, chosen, exact):
    assert chosen.exact(4) is exact and not chosen.lossless()
    assert torch.equal(run((sampler, PLAIN, chosen, None)).codes, run(CASES["llamagen"]).codes) is exact


def test_the_groups_of_a_par_are_never_exact():
    assert not PARSettings(group=1).exact(4)


@pytest.mark.parametrize(("kind", "name"), [("class", "llamagen"), ("text", "llamagen"), ("features", "tar")])
def test_reports_of_a_detokenizer_have_a_name_of_their_own(kind, name):
    settings = LlamaGenSettings(**FEW)
    done = finish(llamagen(tiny_gpt(kind, grid=2), condition_of(kind, (0,)), settings, PairedDraws(5, (0,)), 5))
    assert done.report.sampler == name


def test_a_group_may_be_the_whole_picture_and_no_more():
    chosen = PARSettings(**FEW, grouping=ADJACENT, sequential_start=False)
    whole = run((par, PLAIN, chosen, None), group=16)
    assert not whole.report.maps["step"].any() and whole.report.counts["transformer_passes"] == 1
    with pytest.raises(UserError, match="^group: 17 is more than the picture's 16 tokens"):
        run((par, PLAIN, chosen, None), group=17)
