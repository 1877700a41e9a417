"""Settings that were removed: graphs, prompts and scripts from before run at the value that always holds now, and are
refused at any other.
"""

import json
import re
from types import SimpleNamespace

import pytest
import tiny
import torch
from fastar_nodes import load
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import samplers
from fastar_nodes.runs.choice import choose, parse_choice
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.mar.gtr.settings import GtRSettings
from fastar_nodes.samplers.mar.lazy.schedule import measuring_block
from fastar_nodes.samplers.mar.lazy.settings import CacheSettings
from fastar_nodes.samplers.settings import default_or_full_size, knobs, removed_from, settings_from
from fastar_nodes.samplers.tokens.par import ADJACENT
from graphs import WIDGETS
from tiny import sample

KINDS = {CacheSettings: None} | {entry.settings: None for entry in SAMPLERS.values()}
# Of each removed setting a value that does not hold, and nodes with short runs.
OTHERS = {
    "diffusion_steps_curve": ("cosine", samplers.MARSampler, {}),
    "inner_temperature": (7.0, samplers.CSpDSampler, {}),
    "head_period": (1, samplers.LazyMARSampler, {}),
    "block": (3, samplers.LazyMARSampler, {}),
    "mask_undecoded": (False, samplers.ZipARSampler, {}),
    "align_lookaheads": (True, samplers.FastHybridSampler, {"model": tiny.a_mar()}),
    "group": (16, samplers.PARSampler, {"grouping": ADJACENT, "model": tiny.a_gpt()}),
}
# The second of two decoder blocks never measures: measuring_block is 1 in the tiny model.
OWN_BLOCK = 1


def holds(kind: type, name: str) -> object:
    """The value that a graph may still have."""
    return OWN_BLOCK if name == "block" else removed_from(kind)[name].value


def test_every_removed_setting_is_tested_and_is_no_setting():
    assert {name for kind in KINDS for name in removed_from(kind)} == set(OTHERS)
    for kind in KINDS:
        assert not set(removed_from(kind)) & set(knobs(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_may_name_the_value_that_holds_only(kind):
    for name, (value, _) in removed_from(kind).items():
        assert settings_from(kind, {name: value}) == kind()
        if value is not None:
            assert settings_from(kind, {name: str(value)}) == kind(), "as text"

        other = OTHERS[name][0]
        with pytest.raises(UserError, match=f"^{name}: {other!r} is not possible, because FastAR removed this setting"):
            settings_from(kind, {name: other})


def test_a_line_of_text_and_a_choice_by_name():
    assert parse_choice("zipar: window=3, mask_undecoded=yes", "sampler").values["window"] == "3"
    with pytest.raises(UserError, match=r"^mask_undecoded: 'no' is not possible, .* uses True; leave mask_unde"):
        parse_choice("zipar: window=3, mask_undecoded=no", "sampler")
    with pytest.raises(UserError, match="^block: 2 is not possible, .* lets the model decide; leave block out"):
        choose("lazymar", {"block": 2})
    with pytest.raises(UserError, match="^block: no such setting"):
        choose("zipar", {"block": None})


def sent(node: type, **inputs: object) -> type:
    """The node as ComfyUI executes it, in a prompt with more inputs than it passes."""
    prompt = {"7": {"class_type": node.node_id, "inputs": inputs}}
    return type("Sent", (node,), {"hidden": SimpleNamespace(unique_id="7", prompt=prompt, extra_pnginfo=None)})


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("way", ["prompt", "script"])
def test_a_graph_with_a_removed_setting(name, way):
    """ComfyUI passes no input that the schema lacks; an exported script does."""
    other, node, more = OTHERS[name]
    kind = SAMPLERS[node.sampler].settings

    def run(value):
        if way == "prompt":
            return sample(sent(node, **{name: value}), **more)[0]
        return sample(node, **more, **{name: value})[0]

    torch.manual_seed(1)
    plain = sample(node, **more)[0]
    assert torch.equal(run(holds(kind, name)), plain)
    with pytest.raises(UserError, match=f"^{name}: {other!r} is not possible"):
        run(other)
    if way == "prompt":
        with pytest.raises(UserError, match=f"^{name}: .*'4', 0"):
            run(["4", 0])  # a link


def test_a_cache_with_removed_settings_is_checked_with_the_model():
    def run(**given):
        node = type("Sent", (samplers.LazyMARCache,), {"hidden": None})
        node.hidden = SimpleNamespace(unique_id="7", prompt={"7": {"inputs": given}}, extra_pnginfo=None)
        return sample(samplers.MARSampler, cache=node.execute(preset="custom").result[0])[0]

    assert torch.equal(run(block=OWN_BLOCK, head_period=7), run())
    for name in ("block", "head_period"):
        other = OTHERS[name][0]
        with pytest.raises(UserError, match=f"^cache: the settings of LazyMAR Cache do not fit .{name}: {other} is"):
            run(**{name: other})


def test_the_editor_has_the_same_names_and_values(root):
    script = (root / "web" / "js" / "removed.js").read_text(encoding="utf-8")
    values = re.search(r"const HOLDS = (\{.+\})", script)[1]
    found = json.loads(re.sub(r"(\w+):", r'"\1":', values))
    removed = {name: setting for kind in KINDS for name, setting in removed_from(kind).items()}
    assert found == {name: setting.value for name, setting in removed.items() if name != "block"}

    instead = dict(re.findall(r'(\w+): \(\) => say\("(.+?)"\)', script))
    assert instead == {name: setting.instead for name, setting in removed.items() if setting.instead}

    for node, names in re.findall(r"^  (FastAR\w+): \[(.+)\],$", script, re.MULTILINE):
        (taken,) = [n for n in samplers.NODES if n.define_schema().node_id == node]
        kind = SAMPLERS[taken.sampler].settings if hasattr(taken, "sampler") else CacheSettings
        assert set(re.findall(r'"(\w+)"', names)) == set(removed_from(kind)), node
    # A sampler that came after the settings went was never saved with them.
    assert len(re.findall(r"^  FastAR\w+: \[", script, re.MULTILINE)) == 8

    blocks = json.loads(re.search(r"const DEMO_BLOCKS = (\{.+\})", script)[1])
    assert blocks.keys() == {"demo", "demo-draft", "demo-hybrid"}
    for name, block in blocks.items():
        assert measuring_block(load(name).model.net.config.decoder_depth) == block


def test_gtr_from_before_its_stages(root):
    """A graph or prompt with all other numbers keeps the stages it was saved with; others get the preset's."""
    script = (root / "web" / "js" / "removed.js").read_text(encoding="utf-8")
    position = int(re.search(r'FastARGtRSampler: \{ (\d+): "quarters" \}', script)[1])
    widgets = [i.id for i in samplers.GtRSampler.define_schema().inputs if i.kind in WIDGETS]
    widgets.insert(1, "control_after_generate")
    assert widgets[position] == "stages"

    values = {"steps": 5, "diffusion_steps": 4, "diffusion_steps_end": 3, "first_share": 0.5, "t_max": 950}
    saved = {
        name: default_or_full_size(default, about) for name, (default, about) in knobs(GtRSettings).items()
    } | values
    del saved["stages"]

    def stages(**sent):
        return sample(samplers.GtRSampler, preset="custom", **sent)[1].settings["stages"]

    assert (stages(**saved), stages(**saved, stages="paper"), stages(**values)) == ("quarters", "paper", "paper")
