"""Names of a sweep's cells: they hold everything that decided the image, also what is not there yet."""

from dataclasses import fields, make_dataclass, replace
from pathlib import Path

import fake_comfy
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.networks.nextstep import Marks
from fastar_nodes.networks.ta_tok import TATokModel
from fastar_nodes.nodes import sweep
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.runs.choice import choose
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.sweeps import keys
from janus_files import tiny_janus
from tar_files import tiny_ta_tok
from tiny import LABELS, READER, a_block, a_drawer, a_gpt, a_mar, a_nextstep, a_prompt, a_vae, a_vq
from tiny_hybrids import tiny_hybrid

PROMPT = PromptCondition(("a cat",), "")


def a_hybrid() -> Loaded:
    return Loaded.of(tiny_hybrid(), a_vae())


def a_janus() -> Loaded:
    model = tiny_janus()
    return Loaded.of(model, a_vq(model))


# Model, sampler and condition.
FAMILIES = {
    "a MAR": (a_mar, "mar", LABELS),
    "a hybrid": (a_hybrid, "mar", PROMPT),
    "a LlamaGen": (a_gpt, "llamagen", LABELS),
    "a Janus": (a_janus, "llamagen", PROMPT),
    "a de-tokenizer": (a_drawer, "llamagen", a_prompt),
    "a BitDance": (a_block, "bitdance", LABELS),
    "a NextStep": (a_nextstep, "nextstep", PROMPT),
}


def key(loaded: Loaded, sampler: str, condition, draft: Loaded | None = None) -> str:
    condition = condition() if callable(condition) else condition
    (found,) = sweep._names([sweep._Run(choose(sampler, {}), 7, sweep._Subject(loaded, condition))], draft)
    return found


def with_field(record, value):
    """The record of a model as a later version may have it, with one field more."""
    kind = make_dataclass("Later", [("twist", float)], bases=(type(record),), frozen=True, eq=False, kw_only=True)
    return kind(**{f.name: getattr(record, f.name) for f in fields(record)}, twist=value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_field_of_a_models_record_is_in_the_key(family):
    make, sampler, condition = FAMILIES[family]
    loaded = make()
    later = [replace(loaded, model=with_field(loaded.model, twist)) for twist in (1.0, 1.0, 2.0)]
    names = [key(one, sampler, condition) for one in later]
    assert names[0] == names[1] != names[2]


def test_cells_of_another_device_are_others(monkeypatch):
    """Their seconds are compared, and their last bits may differ."""
    model = a_mar()
    names = []
    for device in ("cpu", "cpu", "another card"):
        monkeypatch.setattr(fake_comfy.state, "device", device)
        names.append(key(model, "mar", LABELS))
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_field_of_a_networks_configuration_is_in_the_key(family):
    """Heads, for example, which no weight shows."""
    make, sampler, condition = FAMILIES[family]
    loaded = make()
    config = loaded.model.net.config
    names = []
    for twist in (1, 1, 2):
        loaded.model.net.config = with_field(config, twist)
        names.append(key(loaded, sampler, condition))
    assert names[0] == names[1] != names[2]


# What loaders decide beside the weights.
DECIDED = {
    "grid": (a_gpt, "llamagen", {"grid": 8}),
    "latent scale": (a_mar, "mar", {"latent_scale": 0.25}),
    "first timestep": (a_mar, "mar", {"t_max": 900}),
    "largest beta": (a_mar, "mar", {"max_beta": 0.5}),
    "time shift": (a_block, "bitdance", {"time_shift": 3.0}),
    "size of a token": (a_block, "bitdance", {"stride": 4}),
    "tokenizer": (a_hybrid, "mar", {"tokenize": lambda text: [1 + ord(c) % 120 for c in text]}),
    "special tokens": (a_hybrid, "mar", {"turn": (1, 2)}),
    "marks": (a_nextstep, "nextstep", {"marks": Marks(1, 2, 3, 4, text=5)}),
    "side of the images": (a_nextstep, "nextstep", {"side": 2}),
    "pixels of a token": (a_nextstep, "nextstep", {"stride": 8}),
    "tokenizer of a NextStep": (a_nextstep, "nextstep", {"tokenize": lambda text: [1 + ord(c) % 120 for c in text]}),
    "name": (a_mar, "mar", {"name": "renamed"}),
    "semantic codes' reader": (a_drawer, "llamagen", {"ta_tok": TATokModel(tiny_ta_tok(READER, 5), "other")}),
}


@pytest.mark.parametrize("what", DECIDED)
def test_what_a_loader_decides_is_in_the_key(what):
    make, sampler, changes = DECIDED[what]
    loaded = make()
    condition = PROMPT if make in (a_hybrid, a_nextstep) else a_prompt if make is a_drawer else LABELS
    changed = replace(loaded, model=replace(loaded.model, **changes))
    assert key(loaded, sampler, condition) == key(loaded, sampler, condition) != key(changed, sampler, condition)


def test_the_decoder_is_in_the_key():
    """Its weights, and its groups, which no weight shows."""
    loaded = a_gpt()
    net = loaded.vae.first_stage_model
    names = [key(loaded, "llamagen", LABELS)]
    net.config = replace(net.config, groups=2)
    names.append(key(loaded, "llamagen", LABELS))
    with torch.no_grad():
        net.decoder.conv_out.bias += 1
    names.append(key(loaded, "llamagen", LABELS))
    assert len({*names}) == 3


def test_the_reader_of_semantic_codes_is_in_the_key():
    loaded = a_drawer()
    first = key(loaded, "llamagen", a_prompt)
    reader = loaded.parts["ta_tok"].model
    parts = {"ta_tok": Loaded.of(replace(reader, net=tiny_ta_tok(READER, 5)))}
    assert key(replace(loaded, parts=parts), "llamagen", a_prompt) != first


def test_the_draft_model_is_in_the_key():
    """Its weights, what its loader decided, and whether there is one."""
    target, small = a_mar(), a_mar()
    names = [key(target, "cspd", LABELS, small)]
    names.append(key(target, "cspd", LABELS, replace(small, model=replace(small.model, t_max=900))))
    with torch.no_grad():
        next(small.model.net.parameters()).add_(1)
    names.append(key(target, "cspd", LABELS, small))
    names.append(key(target, "cspd", LABELS))
    assert len({*names}) == 4


def test_another_draft_model_draws_its_own_cells(tmp_path: Path):
    fake_comfy.state.folder = tmp_path
    plan = {"sampler": "cspd", "x": "draft_length", "x_values": "2", "y": "none", "y_values": "", "seeds": "7"}
    about = {**plan, "settings": "steps=4, diffusion_steps=4"}
    target, small, other = a_mar(), a_mar(), a_mar()
    with torch.no_grad():
        for weight in other.model.net.parameters():
            weight.mul_(1.5)

    cells = []
    for draft in (small, other, small):
        sweep.SweepNode.execute(model=target, condition=LABELS, draft=draft, **about)
        cells.append(len(list(tmp_path.rglob("*.png"))))
    assert cells == [2, 4, 4]


# Values and seeds as they are typed, and what they are.
TYPED = {
    "window": ("zipar", "2, 02, 2.0, 3", ("2", "3")),
    "threshold": ("fasthybrid", "0.5, 0.50, .5, 5e-1, 0.6", ("0.5", "0.6")),
    "head_cache": ("lazymar", "true, yes, on, off", ("true", "off")),
    "mode": ("cspd", "lossless, lossless, published", ("lossless", "published")),
    "preset": ("fasthybrid", "exact, exact, fast", ("exact", "fast")),
}


@pytest.mark.parametrize("name", TYPED)
def test_equal_values_are_one_column(name):
    """Figures over them would count one run several times."""
    sampler, text, wanted = TYPED[name]
    plan = {"sampler": sampler, "x": name, "y": "none", "y_values": "", "settings": ""}
    _, axis, _, seeds = sweep._plan(**plan, x_values=text, seeds="7, 07, 9, 007, 7..8")
    assert axis.values == wanted and seeds == [7, 9, 8]


def test_1024_cells_are_possible_and_more_are_not():
    plan = {"sampler": "fasthybrid", "x": "threshold", "y": "lookahead", "settings": "", "x_values": "0..1 x 128"}
    sweep._plan(**plan, y_values="1..4", seeds="1, 2")
    with pytest.raises(UserError, match="^x_values: the sweep would have 1280 cells, but at most 1024 are"):
        sweep._plan(**plan, y_values="1..5", seeds="1, 2")


def test_a_version_that_draws_other_images_draws_its_own_cells(monkeypatch):
    loaded = a_mar()
    first = key(loaded, "mar", LABELS)
    monkeypatch.setattr(keys, "ALGORITHM", keys.ALGORITHM + 1)
    assert key(loaded, "mar", LABELS) != first


def test_cells_of_a_seed_are_drawn_beside_its_plain_run():
    """Otherwise another load on the machine would be on one of a pair alone."""
    base = choose("fasthybrid", {"preset": "fast", "steps": 8})
    x, y = sweep.Axis("threshold", ("0.5", "0.9")), sweep.Axis("lookahead", ("2", "4", "6"))
    runs = sweep._runs(base, {(): sweep._Subject(a_mar(), LABELS)}, x, y, [7, 9])
    assert {run.choice.text for run in runs if run.plain} == {"mar: steps=8"}
    assert [(run.seed, run.plain) for run in runs] == [(s, k == 0) for s in (7, 9) for k in range(7)]
    assert [(run.x, run.y) for run in runs[1:7]] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    for run in runs[8:]:
        values = {"steps": 8, "lookahead": y.values[run.y], "threshold": x.values[run.x]}
        assert (run.choice.preset, run.choice.values) == ("fast", values)
