"""The numbers of a run for everyone who asks for a preset: the editor, graphs that it exported, and programs that send
the defaults of /object_info, or a preset alone. tests/comfyui sends the same over HTTP.
"""

from functools import cache
from types import SimpleNamespace

import pytest
from fastar_nodes.nodes import conditioning, filling, samplers
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.runs import conditions
from fastar_nodes.runs.registry import SAMPLERS, own_values_of
from fastar_nodes.runs.shown import FREE
from fastar_nodes.samplers.mar.settings import CacheSettings
from fastar_nodes.samplers.settings import filled_in, knobs
from fastar_nodes.samplers.tokens.settings import TarPromptSettings
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


def in_graph(node, linked=(), noted=None):
    """The node as ComfyUI executes it, with inputs that are connected, and with the preset that the editor noted."""
    entry = {"inputs": {name: ["9", 0] for name in linked}, "_meta": {"preset": noted}}
    hidden = SimpleNamespace(unique_id="5", prompt={"5": entry}, extra_pnginfo=None)
    return type("Executed", (node,), {"hidden": hidden})


@pytest.fixture
def ran(monkeypatch):
    """A function from a node with its widgets to the numbers of the run and what the node says of them."""

    def run(node, linked=(), noted=None, **inputs):
        found = []
        monkeypatch.setattr(samplers, "run", lambda entry, loaded, settings, seed, sockets: (loaded, settings))
        monkeypatch.setattr(samplers, "reported", lambda node, made, warnings, *rest: found.append((made, warnings)))
        in_graph(node, linked, noted).execute(**given(node), condition=LABELS, seed=3, **inputs)

        (((loaded, settings), warnings),) = found
        numbers = filled_in(settings, own_values_of(loaded.model, settings))
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
    assert ran(node, noted=preset, preset=preset, **numbers) == (numbers, said)


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_a_program_that_sends_the_defaults_gets_the_preset_that_it_names(ran, node, preset, defaults):
    numbers, _ = ran(node, preset=preset)
    found, said = ran(node, preset=preset, **defaults)
    assert found == numbers
    assert said.startswith(
        f"The preset {preset} set all numbers, because the numbers sent were the node's defaults"
    ) == (defaults != numbers)
    # With custom, or without a preset, they are used.
    assert ran(node, preset="custom", **defaults)[0] == ran(node, **defaults)[0] == defaults


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_another_preset_in_an_exported_graph_sets_all_numbers(ran, node, preset):
    numbers, _ = ran(node, preset=preset)
    for other in node.options():
        if other in (preset, "custom"):
            continue
        theirs, _ = ran(node, preset=other)
        for noted in (other, None):
            found, said = ran(node, noted=noted, preset=preset, **theirs)
            assert found == numbers and (other in said or "defaults" in said)


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_a_number_that_was_changed_in_an_exported_graph_is_used(ran, node, preset, defaults):
    numbers, _ = ran(node, preset=preset)
    changes = {"cfg": 3.125}
    # Also the default, and also where all numbers are then another preset's: ZipAR's differ by the window alone.
    changes |= {name: value for name, value in defaults.items() if value != numbers[name]}
    for name, value in changes.items():
        if name == "diffusion_steps_end":  # more than diffusion_steps count as many
            value = min(value, numbers["diffusion_steps"]) - 1
        found, said = ran(node, noted=preset, preset=preset, **{**numbers, name: value})
        assert found == {**numbers, name: value}, name
        assert said.startswith("custom: these numbers are not those of") and f" {preset} has " in said


def test_a_graph_without_the_editors_note_keeps_a_changed_number_unless_all_are_the_defaults(ran):
    node = samplers.FastHybridSampler
    numbers, _ = ran(node, preset="fast")
    assert ran(node, preset="fast", **{**numbers, "threshold": 0.95})[0]["threshold"] == 0.95
    # Of two numbers that differ, only one is the default.
    assert ran(node, preset="fast", **{**numbers, "steps": 64})[0]["steps"] == 64


def test_a_few_numbers_are_used_and_the_preset_sets_the_others(ran):
    """Of a program that sends what it wants to change: the defaults too."""
    node = samplers.FastHybridSampler
    numbers, _ = ran(node, preset="fast")
    usual = listed(node, SAMPLERS[node.sampler].settings)["guided_steps"]
    assert usual != numbers["guided_steps"]
    assert ran(node, preset="fast", guided_steps=usual)[0] == {**numbers, "guided_steps": usual}


def test_a_connected_number_is_used(ran):
    node = samplers.ZipARSampler
    sent = listed(node, SAMPLERS[node.sampler].settings)
    assert ran(node, preset="fast", **sent)[0]["window"] == 4
    assert ran(node, linked=["window"], preset="fast", **sent)[0]["window"] == sent["window"] == 8


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

    def plan(preset, linked=(), noted=None, **values):
        return in_graph(samplers.LazyMARCache, linked, noted).execute(preset=preset, **values).result[0]

    for preset in ("balanced", "fast", "exact"):
        alone, _ = plan(preset).settings(loaded, 32)
        assert plan(preset, **sent).settings(loaded, 32)[0] == alone
        numbers = filled_in(alone, own_values_of(loaded.model, alone))
        used, said = plan(preset, **numbers).settings(loaded, 32)
        assert filled_in(used, {}) == numbers and said == ""
        changed = plan(preset, noted=preset, **{**numbers, "refresh_period": sent["refresh_period"]})
        assert changed.settings(loaded, 32)[0].refresh_period == sent["refresh_period"]
    connected, _ = plan("exact", linked=["start_step"], **sent).settings(loaded, 32)
    assert connected == plan("custom", **sent).settings(loaded, 32)[0]

    _, said = plan("exact", **sent).settings(loaded, 32)
    assert said.startswith(
        "LazyMAR Cache: The preset exact set all numbers, because the numbers sent were the node's defaults"
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

    def settings(noted=None, **inputs):
        used.clear()
        in_graph(node, (), noted).execute(loaded, "a boat", 3, **inputs)
        return used[0]

    alone = settings(preset="recommended")
    assert alone.temperature == 0.5 != sent["temperature"]
    assert settings(preset="recommended", **sent) == alone
    assert settings(preset="recommended", **{**sent, "top_k": 5}).temperature == sent["temperature"]
    assert settings(noted="recommended", preset="recommended", **sent).temperature == sent["temperature"]
    assert settings(preset="custom", **sent).temperature == sent["temperature"]


# A node through which a model arrives, and the loader of the model.
SWITCH = {"class_type": "Any Switch", "inputs": {"any_01": ["1", 0]}}
LOADER = {"class_type": "FastARLoadMAR", "inputs": {"checkpoint": "demo"}}


def behind(node, source, noted):
    """The node as ComfyUI executes it, with a model from the first output of ``source``."""
    known = {part.id for part in node.define_schema().inputs}
    field = next(name for name in ("target", "model", "tar") if name in known)
    graph = {"5": {"inputs": {field: ["4", 0]}, "_meta": {"preset": noted}}, "4": source, "1": LOADER}
    hidden = SimpleNamespace(unique_id="5", prompt=graph, extra_pnginfo=None)
    return type("Executed", (node,), {"hidden": hidden})


@pytest.mark.parametrize(("node", "preset"), CASES, ids=IDS)
def test_the_numbers_of_a_full_size_model_are_the_presets_where_the_editor_cannot_see_the_model(
    ran, monkeypatch, node, preset
):
    numbers, _ = ran(node, preset=preset)
    shown = filling.fill(node.node_id, preset)["values"]

    def run(source, noted, **values):
        monkeypatch.setattr(f"{__name__}.in_graph", lambda node, linked, noted: behind(node, source, noted))
        return ran(node, noted=noted, preset=preset, **values)

    connected = {"class_type": "FastARLoadMAR", "inputs": {"checkpoint": ["8", 0]}}
    for source in (SWITCH, connected):
        found, said = run(source, preset, **shown)
        assert found == numbers
        assert said.startswith(f"The preset {preset} set all numbers, because the numbers sent were for a full-size")

    # A number that was changed since, and a loader that the editor sees.
    assert run(SWITCH, preset, **{**shown, "cfg": 3.125})[0] == {**shown, "cfg": 3.125}
    found, said = run(LOADER, preset, **shown)
    assert found == shown and said.startswith("custom: these numbers are not those of")


def test_a_tar_prompt_behind_a_switch_has_what_the_file_recommends(monkeypatch):
    used = settings_used(monkeypatch)
    loaded = Loaded.of(tiny_tar(), recommended={"temperature": 0.5})
    shown = filling.fill("FastARTarPrompt", "recommended")["values"]
    for source in (SWITCH, {**LOADER, "class_type": "FastARLoadTar"}):
        node = behind(conditioning.TarPrompt, source, "recommended")
        node.execute(loaded, "a boat", 3, preset="recommended", **shown)
    assert [settings.temperature for settings in used] == [0.5, shown["temperature"]]


def test_a_cache_whose_model_the_editor_cannot_see_has_the_numbers_of_its_preset():
    """A switch stands before the sampler, whose steps are known, or between the cache and its sampler."""
    loaded = a_mar(label_set="picture-book")
    switched = {"class_type": "Any Switch", "inputs": {"any_01": ["5", 0]}}
    sampler = {"class_type": "FastARMARSampler", "inputs": {"model": ["4", 0], "cache": ["5", 0]}}

    def plan(graph, preset, **values):
        graph = {"5": {"inputs": {}, "_meta": {"preset": preset}}, **graph}
        hidden = SimpleNamespace(unique_id="5", prompt=graph, extra_pnginfo=None)
        node = type("Executed", (samplers.LazyMARCache,), {"hidden": hidden})
        return node.execute(preset=preset, **values).result[0].settings(loaded, 32)[0]

    for preset in ("balanced", "fast", "exact"):
        alone = plan({}, preset)
        for graph, steps in (({"4": SWITCH, "1": LOADER, "6": sampler}, 32), ({"6": switched}, None)):
            shown = filling.fill("FastARLazyMARCache", preset, None, steps)["values"]
            assert plan(graph, preset, **shown) == alone
            assert plan(graph, preset, **{**shown, "start_step": 7}).start_step == 7

        shown = filling.fill("FastARLazyMARCache", preset, None, 32)["values"]
        seen = plan({"4": LOADER, "6": sampler}, preset, **shown)
        assert filled_in(seen, {}) == shown
