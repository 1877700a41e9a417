"""Presets: values that are settings at all, exact where they say so, and nobody else's business."""

from dataclasses import asdict, replace

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.runs import presets
from fastar_nodes.runs.choice import ModelFacts
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.mar.cspd.settings import CSpDSettings
from fastar_nodes.samplers.mar.fasthybrid.settings import FastHybridSettings
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings, LazyMARSettings
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.settings import knobs, settings_from
from fastar_nodes.samplers.tokens.mulosd.settings import MuLoSDSettings
from fastar_nodes.samplers.tokens.par import PARSettings
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, TokenSettings

REAL = presets.NAMES[:-1]
KINDS = dict.fromkeys(
    [*presets.PRESETS, *(e.settings for e in SAMPLERS.values() if presets.values(e.settings, "fast", True))]
)


def applied(settings, preset, demo=True):
    return replace(settings, **presets.values(type(settings), preset, demo))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("demo", [True, False])
@pytest.mark.parametrize("name", REAL)
def test_values_are_settings_of_the_accelerator(kind, demo, name):
    meant = presets.values(kind, name, demo)
    assert meant, "a preset that sets nothing"
    assert asdict(settings_from(kind, meant)) | meant == asdict(settings_from(kind, meant)), (
        "changed when it was checked"
    )
    allowed = presets.ALSO_SET.get(getattr(kind, "sampler_settings", None) or kind, frozenset())
    also = set(meant) & {*knobs(MARSettings), *knobs(TokenSettings)}
    assert also <= allowed and not (also and name == "exact"), (
        f"the preset {name} of {kind.__name__} sets {', '.join(also)}, which is the user's; leave it out, or name it "
        "in ALSO_SET of runs/presets.py if it is what the method changes"
    )


@pytest.mark.parametrize("kind", presets.ALSO_SET)
def test_what_presets_may_also_set_is_set_by_one(kind):
    chosen = [presets.values(kind, name, demo) for name in ("balanced", "fast") for demo in (True, False)]
    assert presets.ALSO_SET[kind] <= set().union(*chosen), "an exception that nothing needs"


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "+" in name])
@pytest.mark.parametrize("preset", REAL)
def test_a_combination_has_the_presets_of_its_parts(name, preset):
    """The periods of the caches are those of the AR steps that the sampler's preset sets."""
    own = presets.values(SAMPLERS[name.partition("+")[0]].settings, preset, False)
    cache = presets.values(CacheSettings, preset, False, steps=own.get("steps", 64))
    together = vars(ModelFacts().settings(SAMPLERS[name].settings, preset, {}))
    assert {**own, **cache}.items() <= together.items() and not set(own) & set(cache)


def test_what_is_set_stays():
    ours = FastHybridSettings(steps=12, cfg=1.5, guidance_schedule="square", threshold=0.5)
    assert applied(ours, presets.CUSTOM) == ours
    for name, lookahead in (("balanced", 8), ("fast", 8), ("exact", 0)):
        told = applied(ours, name)
        assert (told.steps, told.cfg, told.guidance_schedule) == (12, 1.5, "square")
        assert told.lookahead == lookahead
    for plain in (MARSettings(), LlamaGenSettings(), PARSettings()):
        assert applied(plain, "fast") == plain, "it has nothing to set"


@pytest.mark.parametrize("demo", [True, False])
def test_few_steps_are_what_lazymars_fast_has_beside_its_caches(demo):
    """So plain MAR with *few steps* is the control of LazyMAR's *fast*: only the caches differ."""
    few = presets.values(MARSettings, presets.FEW_STEPS, demo)
    fast = presets.values(LazyMARSettings, "fast", demo)
    assert few == {name: value for name, value in fast.items() if name in knobs(MARSettings)}
    assert set(fast) - set(few) <= set(knobs(CacheSettings)), "nothing but the caches is left"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not MARSettings])
def test_few_steps_are_plain_mars(kind):
    with pytest.raises(UserError, match="^preset: 'few steps' is not one of .* few steps is a preset of plain MAR"):
        presets.values(kind, presets.FEW_STEPS, True)


@pytest.mark.parametrize(
    ("steps", "balanced", "fast"), [(256, 16, 32), (64, 4, 8), (32, 2, 4), (16, 1, 2), (4, 1, 1), (4096, 256, 256)]
)
def test_draft_length_is_a_share_of_the_ar_steps(steps, balanced, fast):
    """The paper's 16 and 32 of 256 AR steps. The demo's are its own."""
    for name, length in (("balanced", balanced), ("fast", fast)):
        assert presets.values(CSpDSettings, name, False, steps=steps)["draft_length"] == length
        assert ModelFacts().settings(CSpDSettings, name, {"steps": steps}).draft_length == length
        assert presets.values(CSpDSettings, name, True, steps=steps) == presets.values(CSpDSettings, name, True)
    assert "draft_length" not in presets.values(CSpDSettings, "exact", False, steps=steps)


@pytest.mark.parametrize(
    "width, steps, k",
    [
        (768, 32, 4),
        (1024, 32, 4),
        (1280, 32, 5),
        (0, 32, 4),
        (768, 128, 14),
        (1280, 256, 36),
        (1024, 16, 2),
        (768, 1, 2),
    ],
)
def test_lookahead_is_a_share_of_the_ar_steps(width, steps, k):
    """The paper's k is for 64 AR steps. It follows those of the run, whoever names them; a k that is named stays."""
    for name, times in (("balanced", 1), ("fast", 2)):
        assert presets.values(FastHybridSettings, name, False, width, steps)["lookahead"] == times * k
        asked = ModelFacts(width=width).settings(FastHybridSettings, name, {"steps": steps})
        of_file = ModelFacts(False, width, {"steps": steps}).settings(FastHybridSettings, name, {})
        assert asked.lookahead == of_file.lookahead == times * k
        own = ModelFacts(width=width).settings(FastHybridSettings, name, {"steps": steps, "lookahead": 3})
        assert own.lookahead == 3
    assert presets.values(FastHybridSettings, "exact", False, width, steps)["lookahead"] == 0


@pytest.mark.parametrize("name", ["best", "", None, "Exact"])
def test_no_such_preset(name):
    with pytest.raises(UserError, match="^preset: .* is not one of balanced, fast, exact, custom"):
        presets.values(LazyMARSettings, name, True)


UNLIKE = {
    MuLoSDSettings: {"tau": 0.0, "acceptance_target": 0.9, "resample_window": 2},
    CSpDSettings: {"mode": "published"},
}


@pytest.mark.parametrize("demo", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_is_exact_and_fast_is_not(kind, demo):
    """Images at such settings: test_exact_settings.py, test_tokens_decoding.py and test_mulosd.py."""
    exact, fast = (applied(kind(**UNLIKE.get(kind, {})), name, demo) for name in ("exact", "fast"))
    assert exact.exact(8), (
        f"the preset exact of {kind.__name__} is not exact; a sampler with caches has a function in PRESETS of "
        "runs/presets.py, with its own exact setting"
    )
    assert kind is not CSpDSettings or exact.mode == "lossless"
    assert not fast.exact(8)


@pytest.mark.parametrize(("asked", "periods"), [({}, (5, 4)), ({"steps": 64}, (9, 5)), ({"steps": 32}, (5, 4))])
def test_periods_of_the_caches_follow_the_steps_that_run(asked, periods):
    """GtR's preset sets 17 AR steps; a user's number replaces it."""
    found = ModelFacts().settings(SAMPLERS["gtr+lazymar"].settings, "balanced", asked)
    assert found.steps == asked.get("steps", 17) and (found.refresh_period, found.start_step) == periods
