"""Settings: every field explains itself, every bad value gets its sentence."""

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.samplers.mar.settings import FastHybridSettings, MARSettings
from fastar_nodes.samplers.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs, make
from fastar_nodes.samplers.tokens.settings import TarPromptSettings


@pytest.mark.parametrize("kind", {TarPromptSettings: None} | {entry.settings: None for entry in SAMPLERS.values()})
def test_every_field_has_help_a_valid_default_and_ends(kind):
    for name, (default, about) in knobs(kind).items():
        assert about.help.endswith(".") and len(about.help) > 20, name
        ranged = about.low is not None and about.high is not None and about.step
        assert ranged or about.choices or isinstance(default, bool), name
        make(kind, {name: default})
        ends = (
            (about.low - about.step, about.high + about.step, 1e9, float("nan"), float("inf"))
            if ranged
            else ("spiral",)
        )
        for value in ends if ranged or about.choices else ():
            with pytest.raises(UserError, match=f"^{name}: "):
                make(kind, {name: value})
    assert make(kind, {}) == kind()


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("cfg", bad) for bad in ("much", None, float("-inf"))), ("ar_steps", 2.5), ("order", 3), ("speed", 9)],
)
def test_values_of_another_kind(name, value):
    with pytest.raises(UserError, match=f"^{name}: "):
        make(MARSettings, {name: value})


def test_text_from_a_command_line_is_understood():
    made = make(FastHybridSettings, {"ar_steps": "16", "threshold": "0.95", "order": "raster"})
    assert (made.ar_steps, made.threshold, made.order) == (16, 0.95, "raster") and isinstance(made.ar_steps, int)
