"""The numbers of a run for everyone who asks for a preset: the editor and programs that send a preset alone, and those
that send all defaults of /object_info with it. tests/comfyui sends the same over HTTP.
"""

from dataclasses import replace
from functools import cache

import pytest
from fastar_nodes.nodes import conditioning, samplers
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.nodes.sent import FREE
from fastar_nodes.runs import conditions
from fastar_nodes.runs.choice import ModelFacts
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.settings import filled_in, knobs
from fastar_nodes.samplers.tokens.tar import TarPromptSettings
from graphs import WIDGETS, default
from qwen_reference import tiny_tar
from tiny import LABELS, NODES, a_gpt, a_mar, models

# Models' files recommend other numbers than those of a new node.
FILES = {
    "masked": (a_mar, {"steps": 32, "diffusion_steps": 40, "cfg": 2.0}),
    "tokens": (a_gpt, {"cfg": 2.0, "top_k": 9}),
}
CASES = [(node, preset) for node in NODES.values() for preset in node.options() if preset != "custom"]
IDS = [f"{node.sampler}-{preset}" for node, preset in CASES]


@cache
def given(node):
    """Models of the demo's label set. No test here runs them."""
    family = SAMPLERS[node.sampler].family
    if family.kind not in FILES:
        return models(node)

    target = "target" if "target" in node.models else "model"
    make, file = FILES[family.kind]
    return {**models(node), target: make(label_set="picture-book", file=file)}


def listed(node, kind):
    """The numbers that /object_info lists for a node."""
    return {i.id: default(i) for i in node.define_schema().inputs if i.kind in WIDGETS and i.id in knobs(kind)}


@pytest.fixture
def ran(monkeypatch):
    """A function from a node with its widgets to the numbers of the run and what the node says of them."""

    def run(node, **inputs):
        found = []
        monkeypatch.setattr(samplers, "run", lambda entry, loaded, settings, seed, sockets: (loaded, settings))
        monkeypatch.setattr(samplers, "reported", lambda node, made, warnings, *rest: found.append((made, warnings)))
        node.execute(**given(node), condition=LABELS, seed=3, **inputs)

        (((loaded, settings), warnings),) = found
        numbers = filled_in(settings, ModelFacts.of(loaded.model, {}).own_values(settings))
        return {k: v for k, v in numbers.items() if k not in FREE}, " ".join(filter(None, warnings))

    return run


@pytest.fixture
def defaults(request):
    node = request.getfixturevalue("node")
    return {k: v for k, v in listed(node, SAMPLERS[node.sampler].settings).items() if k not in FREE}


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_the_numbers_that_the_editor_shows_are_those_of_the_preset_alone(ran, node, preset):
    numbers, said = ran(node, preset=preset)
    assert "preset" not in said and "custom" not in said
    assert ran(node, preset=preset, **numbers) == (numbers, said)


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_a_program_that_sends_the_defaults_gets_the_preset_that_it_names(ran, node, preset, defaults):
    numbers, _ = ran(node, preset=preset)
    found, said = ran(node, preset=preset, **defaults)
    assert found == numbers
    assert said.startswith(
        f"The preset {preset} set all numbers, because the request contained the node's default numbers"
    ) == (defaults != numbers)
    assert ran(node, preset="custom", **defaults)[0] == defaults


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_a_number_that_was_sent_is_used(ran, node, preset, defaults):
    """The default too, and the node says which are not the preset's."""
    numbers, _ = ran(node, preset=preset)
    changes = {"cfg": 3.125}
    changes |= {name: value for name, value in defaults.items() if value != numbers[name]}
    for name, value in changes.items():
        if name == "diffusion_steps_end":  # more than diffusion_steps count as many
            value = min(value, numbers["diffusion_steps"]) - 1

        # Alone, and beside all numbers of the preset.
        assert ran(node, preset=preset, **{name: value})[0][name] == value
        changed = {**numbers, name: value}
        if changed == defaults:
            continue  # see above
        found, said = ran(node, preset=preset, **changed)
        assert found == changed, name
        assert said.startswith("custom: for this model") and f" {preset} has " in said


def test_a_few_numbers_are_used_and_the_preset_sets_the_others(ran):
    """Of a program that sends what it wants to change: the defaults too."""
    node = samplers.FastHybridSampler
    numbers, _ = ran(node, preset="fast")
    usual = listed(node, SAMPLERS[node.sampler].settings)["guided_steps"]
    assert usual != numbers["guided_steps"]
    assert ran(node, preset="fast", guided_steps=usual)[0] == {**numbers, "guided_steps": usual}


def test_settings_that_no_preset_sets_stay(ran, monkeypatch):
    node = samplers.ZipARSampler
    sent = listed(node, SAMPLERS[node.sampler].settings)
    numbers, _ = ran(node, preset="exact")
    assert numbers["window"] == 256
    found = []
    monkeypatch.setattr(samplers, "run", lambda entry, loaded, settings, *rest: found.append(settings))
    monkeypatch.setattr(samplers, "reported", lambda *given: None)
    node.execute(**given(node), condition=LABELS, seed=3, preset="exact", **{**sent, "parallel": 4})
    assert (found[0].parallel, found[0].window) == (4, 256)


def test_a_cache_that_is_sent_with_its_defaults_has_the_numbers_of_its_preset():
    loaded = a_mar(label_set="picture-book")
    sent = listed(samplers.LazyMARCache, CacheSettings)

    def plan(preset, **values):
        return samplers.LazyMARCache.execute(preset=preset, **values).result[0]

    for preset in ("balanced", "fast", "exact"):
        alone, _ = plan(preset).settings(loaded, 32)
        assert plan(preset, **sent).settings(loaded, 32)[0] == alone
        numbers = filled_in(alone, ModelFacts.of(loaded.model, {}).own_values(alone))
        used, said = plan(preset, **numbers).settings(loaded, 32)
        assert filled_in(used, {}) == numbers and said == ""
        assert plan(preset, refresh_period=3).settings(loaded, 32)[0] == replace(alone, refresh_period=3)

    _, said = plan("exact", **sent).settings(loaded, 32)
    assert said.startswith(
        "LazyMAR Cache: The preset exact set all numbers, because the request contained the node's default numbers"
    )


def settings_used(monkeypatch):
    """A list that receives the settings of every prompt that Tar's language model reads from now on."""
    used = []
    prompted = conditions.tar_prompt
    monkeypatch.setattr(
        conditions,
        "tar_prompt",
        lambda model, texts, settings, draws: used.append(settings) or prompted(model, texts, settings, draws),
    )
    return used


def test_a_tar_prompt_that_is_sent_with_its_defaults_has_what_the_file_recommends(monkeypatch):
    """The tiny model's own repetition penalty is not the published one."""
    node = conditioning.TarPrompt
    used = settings_used(monkeypatch)
    loaded = Loaded.of(tiny_tar(), recommended={"temperature": 0.5})
    sent = listed(node, TarPromptSettings)

    def settings(**inputs):
        used.clear()
        node.execute(loaded, "a boat", 3, **inputs)
        return used[0]

    alone = settings(preset="recommended")
    assert alone.temperature == 0.5 != sent["temperature"]
    assert settings(preset="recommended", **sent) == alone
    assert settings(preset="recommended", **{**sent, "top_k": 5}).temperature == sent["temperature"]
    assert settings(preset="custom", **sent).temperature == sent["temperature"]
