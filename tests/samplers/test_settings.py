"""Settings: every field explains itself, every bad value gets its sentence."""

import dataclasses

import numpy as np
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.runs.choice import parse_choice
from fastar_nodes.runs.measured import AdviceSettings
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.mar.fasthybrid.settings import FastHybridSettings
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.settings import knobs, settings_from
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.tar import TarPromptSettings


@pytest.mark.parametrize("kind", {TarPromptSettings: None} | {entry.settings: None for entry in SAMPLERS.values()})
def test_every_field_has_help_a_valid_default_and_ends(kind):
    for name, (default, about) in knobs(kind).items():
        assert about.help.endswith(".") and len(about.help) > 20, name
        ranged = about.low is not None and about.high is not None and about.step
        assert ranged or about.choices or isinstance(default, bool), name
        settings_from(kind, {name: default})
        ends = (
            (about.low - about.step, about.high + about.step, 1e9, float("nan"), float("inf"))
            if ranged
            else ("spiral",)
        )
        for value in ends if ranged or about.choices else ():
            with pytest.raises(UserError, match=f"^{name}: "):
                settings_from(kind, {name: value})
    assert settings_from(kind, {}) == kind()


def test_an_unknown_setting_is_answered_with_the_closest_and_all():
    with pytest.raises(UserError, match=r"^ar_setps: no such setting; did you mean steps\? Choose one of steps, diff"):
        settings_from(MARSettings, {"ar_setps": 3})
    with pytest.raises(UserError, match="^window: no such setting; choose one of steps, diffusion_steps"):
        settings_from(MARSettings, {"window": 3})
    assert settings_from(MARSettings, {"steps": 3}).steps == 3, "the remedy"


# A value, and the sentence that it gets however it is given.
BAD = {
    "cfg_schedule": ("cosine", "cfg_schedule: 'cosine' is not one of linear, constant."),
    "order": ("spiral", "order: 'spiral' is not one of random, raster, halton."),
    "temperature": (-1, "temperature: -1 is outside 0 to 2."),
    "denoise": (1.0000001, "denoise: 1.0000001 is outside 0 to 1."),
    "guided_steps": (0, "guided_steps: 0 is outside 1 to 1000."),
    "lookahead": (-3, "lookahead: -3 is outside 0 to 256."),
    "threshold": (float("nan"), "threshold: nan is not a finite number."),
    "cfg": (float("inf"), "cfg: inf is not a finite number."),
    "steps": (2.5, "steps: 2.5 is not a whole number."),
    "diffusion_steps": (None, "diffusion_steps: None is not a number."),
    "t_max": (True, "t_max: True is not a number."),
    "lookahead_start": (10**400, None),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_made_in_python_check_themselves(name):
    value, sentence = BAD[name]
    for made in (lambda: FastHybridSettings(**{name: value}), lambda: settings_from(FastHybridSettings, {name: value})):
        with pytest.raises(UserError, match=f"^{name}: ") as raised:
            made()
        assert sentence in (None, str(raised.value))
    with pytest.raises(UserError, match=f"^{name}: "):
        dataclasses.replace(FastHybridSettings(), **{name: value})


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (LlamaGenSettings, {"top_p": 2.0}),
        (LlamaGenSettings, {"top_k": "20"}),  # text is for a command line
        (TarPromptSettings, {"detail": 729}),
        (CacheSettings, {"token_cache": 1}),
        (SAMPLERS["fasthybrid+lazymar"].settings, {"refresh_period": 0}),
        (SAMPLERS["fasthybrid+lazymar"].settings, {"guided_steps": 0}),
        (AdviceSettings, {"repeats": 0}),
    ],
)
def test_settings_of_every_family_check_themselves(kind, bad):
    with pytest.raises(UserError, match=f"^{next(iter(bad))}: "):
        kind(**bad)


def test_a_number_gets_the_type_of_its_field():
    made = FastHybridSettings(steps=16.0, cfg=2, guided_steps=np.int64(5), threshold=np.float32(0.5))
    values = (made.steps, made.cfg, made.guided_steps, made.threshold)
    assert values == (16, 2.0, 5, 0.5) and [type(v) for v in values] == [int, float, int, float]


def test_text_from_a_command_line_is_understood():
    made = settings_from(FastHybridSettings, {"steps": "16", "threshold": "0.95", "order": "raster"})
    assert (made.steps, made.threshold, made.order) == (16, 0.95, "raster") and isinstance(made.steps, int)


def test_a_line_without_a_sampler_and_a_name_that_is_long() -> None:
    for line in ("", " : threshold=0.9"):
        with pytest.raises(UserError, match="^sampler: the line names no sampler; name one, for example"):
            parse_choice(line, "sampler")
    with pytest.raises(UserError, match="^sampler: the name of the sampler is too long .201 characters.; write"):
        parse_choice("x" * 201, "sampler")
    assert parse_choice("fasthybrid: preset=fast", "sampler").preset == "fast"
