"""Presets: values that are settings at all, exact where they say so, and nobody else's business."""

from dataclasses import asdict, replace

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.samplers import presets
from fastar_nodes.samplers.mar.settings import CSpDSettings, FastHybridSettings, LazyMARSettings, MARSettings
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs, make
from fastar_nodes.samplers.tokens.settings import (
    LlamaGenSettings,
    MuLoSDSettings,
    PARSettings,
    TokenSettings,
    ZipARSettings,
)

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
    assert asdict(make(kind, meant)) | meant == asdict(make(kind, meant)), "changed when it was checked"
    shared = {*knobs(MARSettings), *knobs(TokenSettings)}
    steps = {"steps", "diffusion_steps", "diffusion_steps_end", "order"}
    allowed = steps if kind is LazyMARSettings and name == "fast" else set()
    assert set(meant) & shared == allowed, "guidance and, but for LazyMAR's fast, steps are not the preset's"


def test_what_is_set_stays():
    ours = FastHybridSettings(steps=12, cfg=1.5, guidance_schedule="square", threshold=0.5)
    assert applied(ours, presets.CUSTOM) == ours
    for name in REAL:
        told = applied(ours, name)
        assert (told.steps, told.cfg, told.guidance_schedule) == (12, 1.5, "square")
        assert told.lookahead == presets.PRESETS[FastHybridSettings][0][name]["lookahead"]
    for plain in (MARSettings(), LlamaGenSettings(), PARSettings()):
        assert applied(plain, "fast") == plain, "it has nothing to set"


@pytest.mark.parametrize("width, k", [(768, 7), (1024, 8), (1280, 9), (0, 8)])
def test_lookahead_follows_the_papers_model_sizes(width, k):
    for name in ("balanced", "fast"):
        assert presets.values(FastHybridSettings, name, False, width)["lookahead"] == k
        assert presets.values(FastHybridSettings, name, True, width) == presets.values(FastHybridSettings, name, True)


@pytest.mark.parametrize(
    ("steps", "balanced", "fast"), [(256, 16, 32), (64, 4, 8), (32, 2, 4), (16, 1, 2), (4, 1, 1), (4096, 256, 256)]
)
def test_draft_length_is_a_share_of_the_ar_steps(steps, balanced, fast):
    """The paper's 16 and 32 of 256 AR steps. The demo's are its own."""
    for name, length in (("balanced", balanced), ("fast", fast)):
        assert presets.values(CSpDSettings, name, False, steps=steps)["draft_length"] == length
        assert presets.combine(CSpDSettings, {}, name, {"steps": steps}, False).draft_length == length
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
    for name in ("balanced", "fast"):
        assert presets.values(FastHybridSettings, name, False, width, steps)["lookahead"] == k
        asked = presets.combine(FastHybridSettings, {}, name, {"steps": steps}, False, width)
        of_file = presets.combine(FastHybridSettings, {"steps": steps}, name, {}, False, width)
        assert asked.lookahead == of_file.lookahead == k
        own = presets.combine(FastHybridSettings, {}, name, {"steps": steps, "lookahead": 3}, False, width)
        assert own.lookahead == 3
    assert presets.values(FastHybridSettings, "exact", False, width, steps)["lookahead"] == 0


@pytest.mark.parametrize("name", ["best", "", None, "Exact"])
def test_no_such_preset(name):
    with pytest.raises(UserError, match="^preset: .* is not one of balanced, fast, exact, custom"):
        presets.values(LazyMARSettings, name, True)


UNLIKE = {
    MuLoSDSettings: {"tau": 0.0, "acceptance_target": 0.9, "resample_window": 2},
    CSpDSettings: {"mode": "published"},
    ZipARSettings: {"mask_undecoded": False},
}


@pytest.mark.parametrize("demo", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_is_exact_and_fast_is_not(kind, demo):
    """Images at such settings: test_exact_settings.py, test_tokens_decoding.py and test_mulosd.py."""
    exact, fast = (applied(kind(**UNLIKE.get(kind, {})), name, demo) for name in ("exact", "fast"))
    assert exact.exact(8) and (kind is not CSpDSettings or exact.mode == "lossless")
    assert not fast.exact(8)
