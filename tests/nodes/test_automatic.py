"""Widgets at auto, presets that follow the model, and the switch that turns an accelerator off."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.checkpoint import read_metadata
from fastar_nodes.nodes import conditioning, loaders, mar_samplers, schema, token_samplers
from fastar_nodes.samplers import presets
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.mar.settings import CacheSettings, CSpDSettings, FastHybridSettings, LazyMARSettings
from fastar_nodes.samplers.settings import knobs
from fastar_nodes.samplers.tokens.settings import MuLoSDSettings, ZipARSettings
from graphs import WIDGETS
from test_node_work import a_model as a_mar
from test_tar_nodes import drawer, prompt
from test_token_nodes import a_model as a_gpt

pytestmark = pytest.mark.usefixtures("one_thread")

# What a model's file might recommend; of it a sampler takes what it has.
MAR_FILE = {"ar_steps": 5, "diffusion_steps": 6, "cfg": 1.5, "temperature": 0.75, "lookahead": 3, "threshold": 0.5}
TOKEN_FILE = {"cfg": 2.0, "temperature": 0.5, "top_k": 9, "top_p": 0.75, "window": 3}
MAR_NODES = {
    mar_samplers.FastHybridSampler: FastHybridSettings,
    mar_samplers.LazyMARSampler: LazyMARSettings,
    mar_samplers.CSpDSampler: CSpDSettings,
}


def dropped(node, **changes):
    """Widget values of a node dropped on the canvas."""
    return {i.id: i.about["default"] for i in node.define_schema().inputs if i.kind in WIDGETS} | changes


def mar(node, label_set: str = "picture-book", file=MAR_FILE, **changes):
    """Latents and report of a MAR sampler."""
    model = replace(a_mar(label_set=label_set), recommended=file)
    sockets = {"draft": a_mar(), "target": model} if node is mar_samplers.CSpDSampler else {"model": model}
    sockets = {k: changes.pop(k, v) for k, v in sockets.items()}
    cache = {k: changes.pop(k) for k in ("cache",) if k in changes}
    done = node.execute(**sockets, **cache, condition=from_ids([1, 2]), **dropped(node, seed=3, **changes))
    return done.result[0]["samples"], done.result[1]


def tokens(node, file=TOKEN_FILE, **changes):
    """Latents and report of a token sampler."""
    model = replace(a_gpt(label_set="picture-book"), recommended=file)
    done = node.execute(model=model, condition=from_ids([1, 2]), **dropped(node, seed=3, **changes))
    return done.result[0]["samples"], done.result[1]


def test_a_dropped_sampler_takes_what_the_models_file_recommends():
    settings = mar(mar_samplers.MARSampler)[1].settings
    assert settings == {k: d for k, (d, _) in knobs(type_of("mar")).items()} | {
        k: v for k, v in MAR_FILE.items() if k in settings
    }
    settings = tokens(token_samplers.LlamaGenSampler)[1].settings
    assert {k: settings[k] for k in TOKEN_FILE if k != "window"} == {
        k: v for k, v in TOKEN_FILE.items() if k != "window"
    }
    # The file's window is the one that was measured on its grid.
    windows = {"none": 3, "balanced for this model": 3, "fast for this model": 4, "exact": 256}
    for preset, window in windows.items():
        assert tokens(token_samplers.ZipARSampler, preset=preset)[1].settings["window"] == window


def test_without_a_file_auto_is_the_papers_default():
    settings = tokens(token_samplers.LlamaGenSampler, {})[1].settings
    assert (settings["cfg"], settings["top_k"], settings["temperature"]) == (4.0, 2000, 1.0)
    settings = mar(mar_samplers.FastHybridSampler, "", {}, preset="none", ar_steps=4, diffusion_steps=4)[1].settings
    assert settings == asdict(FastHybridSettings(ar_steps=4, diffusion_steps=4))


def type_of(name: str) -> type:
    return mar_samplers.SAMPLERS[name].settings


@pytest.mark.parametrize("node", MAR_NODES)
@pytest.mark.parametrize("label_set", ["picture-book", ""])
def test_the_preset_is_for_the_model_and_a_set_widget_wins(node, label_set):
    demo, kind = label_set == "picture-book", MAR_NODES[node]
    for choice, name in schema.PRESETS.items():
        if (node, name) == (mar_samplers.LazyMARSampler, "fast"):
            continue  # it asks for more AR steps than the tiny model has tokens
        meant = presets.values(kind, name, demo, ar_steps=5)
        settings = mar(node, label_set, preset=choice)[1].settings
        expected = asdict(kind()) | {k: v for k, v in MAR_FILE.items() if k in settings} | meant
        assert settings == expected, choice
    settings = mar(node, label_set, cfg=1.25, temperature=0.5)[1].settings
    assert (settings["cfg"], settings["temperature"], settings["ar_steps"]) == (1.25, 0.5, 5)


def test_a_set_widget_wins_over_the_preset_but_exact_is_exact():
    sampler = mar_samplers.FastHybridSampler
    settings = mar(sampler, lookahead=2, threshold=0.25)[1].settings
    assert (settings["lookahead"], settings["threshold"], settings["guided_steps"]) == (2, 0.25, 5)
    exact, report = mar(sampler, preset="exact", lookahead=2)
    plain, _ = mar(mar_samplers.MARSampler)
    assert report.settings["lookahead"] == 0 and torch.equal(exact, plain)


@pytest.mark.parametrize("node", MAR_NODES)
def test_switched_off_a_mar_sampler_is_the_baseline(node):
    off, report = mar(node, enabled=False, preset="fast for this model", cfg=1.25)
    plain, wanted = mar(mar_samplers.MARSampler, cfg=1.25)
    assert torch.equal(off, plain) and (report.sampler, report.settings, report.counts) == (
        "mar",
        wanted.settings,
        wanted.counts,
    )


def test_switched_off_a_token_sampler_is_the_baseline():
    off, report = tokens(token_samplers.ZipARSampler, enabled=False, top_p=0.5)
    plain, wanted = tokens(token_samplers.LlamaGenSampler, top_p=0.5)
    assert torch.equal(off, plain) and report.settings == wanted.settings and report.sampler == "llamagen"
    large, codes = drawer(), prompt()
    changes = {"target": large, "condition": codes, "draft": drawer("small", 1)}
    node = token_samplers.MuLoSDSampler
    done = node.execute(**changes, **dropped(node, enabled=False, seed=3)).result
    node = token_samplers.LlamaGenSampler
    plain = node.execute(model=large, condition=codes, **dropped(node, seed=3)).result
    assert torch.equal(done[0]["samples"], plain[0]["samples"]) and done[1].settings == plain[1].settings


def test_cache_settings_at_auto_follow_the_model_that_is_sampled():
    node = mar_samplers.LazyMARCache
    for choice in ("balanced for this model", "fast for this model"):
        (plan,) = node.execute(**dropped(node, preset=choice, head_cache="off")).result
        for label_set in ("picture-book", ""):
            settings = mar(mar_samplers.MARSampler, label_set, cache=plan)[1].settings
            name = schema.PRESETS[choice]
            meant = presets.values(CacheSettings, name, label_set == "picture-book", ar_steps=5) | {"head_cache": False}
            assert {k: settings[k] for k in meant} == meant
    (plan,) = node.execute(**dropped(node, preset="exact", head_cache="on")).result
    exact, _ = mar(mar_samplers.MARSampler, cache=plan)
    assert torch.allclose(exact, mar(mar_samplers.MARSampler)[0], atol=1e-5)
    with pytest.raises(UserError, match="^refresh_period: 5000 is outside 1 to 4096"):
        node.execute(**dropped(node, refresh_period=5000))


def test_numbers_between_auto_and_the_range_are_auto_too():
    """The editor's arrows pass through them."""
    automatic = schema.automatic_names(FastHybridSettings)
    for name, value in {"ar_steps": 0, "cfg": 0.9, "lookahead": -1, "threshold": -0.5, "temperature": -0.01}.items():
        assert schema.chosen(FastHybridSettings, {name: value}, automatic) == {}
    for name, value in {"ar_steps": 1, "cfg": 1.0, "lookahead": 0, "threshold": 0.0, "temperature": 0.0}.items():
        assert schema.chosen(FastHybridSettings, {name: value}, automatic) == {name: value}
    for name, value in {"ar_steps": -5, "cfg": float("nan"), "lookahead": -2, "t_max": -1, "order": "auto"}.items():
        with pytest.raises(UserError, match=f"^{name}: "):
            schema.settings_of(FastHybridSettings, {name: value}, {}, demo=True)


@pytest.mark.parametrize("kind", [*MAR_NODES.values(), CacheSettings, ZipARSettings, MuLoSDSettings])
def test_every_setting_of_a_preset_has_the_value_auto(kind):
    assert presets.names(kind) <= schema.automatic_names(kind)
    for demo in (True, False):
        for name in presets.NAMES:
            assert set(presets.values(kind, name, demo)) <= presets.names(kind)


def test_a_mistake_in_a_models_file_is_a_sentence():
    with pytest.raises(UserError, match=r"^model: its file recommends .* \(cfg: 100 is outside 1 to 20\)"):
        mar(mar_samplers.MARSampler, file={"cfg": 100.0})


# --- labels


def label(labels: str, **changes):
    node = conditioning.ClassLabel
    return node.execute(**dropped(node, labels=labels, **changes)).result[0]


def test_labels_take_the_label_set_of_the_model():
    assert conditioning.as_labels(label("cat, 3"), "picture-book").labels == (9, 3)
    tabby = conditioning.as_labels(label("tabby", images_per_label=2), "imagenet-1k")
    assert tabby.labels == (281, 281) and tabby.label_set == "imagenet-1k"
    assert conditioning.as_labels(label("7"), "").labels == (7,)
    with pytest.raises(UserError, match="^condition: there is no class 'tabby'"):
        conditioning.as_labels(label("tabby"), "picture-book")
    both = label("cat", add_label="goldfish (imagenet-1k)")
    with pytest.raises(UserError, match="^condition: there is no class 'goldfish'"):
        conditioning.as_labels(both, "picture-book")
    samples, _ = mar(mar_samplers.MARSampler)
    model = replace(a_mar(label_set="picture-book"), recommended=MAR_FILE)
    node = mar_samplers.MARSampler
    done = node.execute(model=model, condition=label("mountains, flower"), **dropped(node, seed=3)).result[0]
    assert torch.equal(done["samples"], samples)


def test_every_unknown_label_is_named_before_the_run():
    check = conditioning.ClassLabel.validate_inputs
    assert check("cat, 281\ntabby") is True and check("") is True and check(None) is True
    words = check("catt, boat, golden retriver, 1000")
    assert (
        "'catt'" in words and "the closest: cat (picture-book)" in words and "golden retriever (imagenet-1k)" in words
    )
    assert "'1000'" in words and "boat'" not in words and words.endswith(".") and "labels:" not in words


# --- the demo


@pytest.mark.parametrize("choice", ["demo", "demo-draft", "demo-llamagen", "demo-llamagen-low", "demo-par"])
def test_loaders_hand_over_what_the_demos_files_recommend(choice, root):
    is_mar = choice in ("demo", "demo-draft")
    node = loaders.LoadMAR if is_mar else loaders.LoadLlamaGen
    loaded = node.execute(**dropped(node, checkpoint=choice)).result[0]
    entry = next(e for e in hub.entries("mar" if is_mar else "llamagen") if e.id == choice)
    stated = json.loads(read_metadata(root / entry.file)["defaults"])
    assert stated and {k: loaded.recommended[k] for k in stated} == stated
    kind = type_of("mar") if is_mar else ZipARSettings
    node = mar_samplers.MARSampler if is_mar else token_samplers.ZipARSampler
    settings = asdict(
        schema.settings_of(kind, {k: v for k, v in dropped(node).items() if k in knobs(kind)}, stated, True)
    )
    assert {k: settings[k] for k in stated if k in settings} == {k: v for k, v in stated.items() if k in settings}
