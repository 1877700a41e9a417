"""Sweep, Any Sampler, Load Report, and
the line and metadata that samplers and Compare leave behind.
"""

import itertools
import json
import re
from types import SimpleNamespace

import fake_comfy
import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import advisor, compare, conditioning, loaders, preview, remaking, samplers, sharing
from fastar_nodes.nodes import sweep as sweep_nodes
from fastar_nodes.reports import exchange, record
from fastar_nodes.runs import advice
from fastar_nodes.runs.choice import parse_choice
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.sweeps import images as images_of_sweeps
from fastar_nodes.sweeps.images import sweep_grid, sweep_plot
from fastar_nodes.sweeps.keys import digest
from fastar_nodes.sweeps.sweep import sweep_table
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tiny import LABELS as WHAT
from tiny import a_gpt, a_mar, dropped, sample

SWEEP = {
    "condition": WHAT,
    "sampler": "fasthybrid",
    "settings": "steps=4, diffusion_steps=4, guided_steps=2, lookahead=2",
    "x": "threshold",
    "x_values": "-1, 0.5..1.01 x 2",
    "y": "lookahead_start",
    "y_values": "0, 2",
    "seeds": "7..8",
}
SMALL = {"x_values": "0.5", "y": "none", "seeds": "7"}


@pytest.fixture(autouse=True)
def folder(tmp_path):
    fake_comfy.state.folder = tmp_path
    (tmp_path / "input").mkdir()
    return tmp_path / "output" / "fastar_sweeps" / "sweep"


def sweep(model=None, **changes):
    """The sweep and its table."""
    found, _ = sweep_nodes.run(sweep_nodes.SweepNode, model or a_mar(), **{**SWEEP, **changes})
    return found, sweep_table(found)


def test_a_sweep_runs_every_combination_and_its_baselines(folder):
    model = a_mar()
    found, table = sweep(model)
    assert len(found.cells) == 3 * 2 * 2 and len(list(folder.glob("*.png"))) == 12 + 2
    assert found.x.values == ("-1", "0.5", "1.01") and found.seeds == (7, 8)
    for cell in found.cells:
        assert cell.report.settings["threshold"] == float(found.x.values[cell.x])
        assert cell.report.settings["lookahead_start"] == int(found.y.values[cell.y])
        assert cell.report.seed == cell.baseline.seed == cell.seed and cell.baseline.sampler == "mar"
        assert cell.baseline.settings["steps"] == 4
    # Every draft redone is plain MAR: the rounding of 8-bit images at most.
    assert all(c.quality.identical or c.quality.psnr > 45 for c in found.cells if c.x == 2)
    assert len(table.splitlines()) == 2 + 6
    # The cells are what the sampler's own node draws.
    line = f"fasthybrid: {SWEEP['settings']}, threshold=0.5, lookahead_start=2"
    latent, _ = sharing.AnySampler.execute(model, condition=WHAT, seed=8, sampler=line).result
    own = (model.vae.decode(latent["samples"]).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    (cell,) = [c for c in found.cells if (c.x, c.y, c.seed) == (1, 1, 8)]
    assert np.array_equal(found.store.read(cell.key)[0], own)
    # Another value draws its own cells, and no other. That an interrupted sweep goes on is tested in tests/comfyui.
    sweep(model, x_values="-1, 0.5, 0.7, 1.01")
    assert len(list(folder.glob("*.png"))) == 14 + 4


def test_a_cell_that_is_the_plain_samplers_own_run_is_the_baseline():
    """MAR's steps 4 are the plain run, of which a ratio would be of a run and itself; one alone is no baseline."""
    about = {"sampler": "mar", "settings": "steps=4, diffusion_steps=4", "y": "none", "seeds": "7, 8"}
    _, table = sweep(**about, x="temperature", x_values="1.0, 0.9")
    speedups = [line.split("|")[-2].strip() for line in table.splitlines()[2:]]
    assert speedups[0] == "baseline" and speedups[1] not in ("", "baseline")
    found, alone = sweep(**about, x="temperature", x_values="1.0")
    assert "speed-up" not in alone and "identical" not in alone and len(found.cells) == 2
    assert all(cell.baseline is None for cell in found.cells)


@pytest.mark.parametrize("field", ["x_values", "y_values", "seeds", "settings", "folder"])
@pytest.mark.parametrize("value", [None, 7, ["a"], torch.zeros(3)], ids=str)
def test_a_value_that_is_no_text_is_refused(field, value):
    """Over a link of any type."""
    with pytest.raises(UserError, match=f"^{field}: "):
        sweep(**{field: value})


def test_seeds_keep_the_order_in_which_they_were_typed(folder):
    """The grid names its rows by it."""
    found, _ = sweep(**{**SMALL, "x_values": "0.5, 0.7", "seeds": "8, 7"})
    assert found.seeds == (8, 7)
    assert [(cell.seed, found.x.values[cell.x]) for cell in found.cells] == [
        (8, "0.5"),
        (8, "0.7"),
        (7, "0.5"),
        (7, "0.7"),
    ]


def test_a_folder_name_of_any_length_and_content_stays_inside(folder):
    model = a_mar()
    for name in ("x" * 500, "../../up", "/etc/x", "..", " ", "a/b\\c:d\0e"):
        sweep(model, **SMALL, folder=name)
    assert {p.parent for p in folder.parents[2].rglob("*.png")} <= {*folder.parent.iterdir()}


def test_a_preset_is_a_setting(folder):
    found, _ = sweep(x="preset", x_values="exact, fast", y="none", settings="steps=4, diffusion_steps=4")
    # The demo's 8, and no more than there are AR steps.
    assert [c.report.settings["lookahead"] for c in found.cells[:2]] == [0, 4] and found.cells[0].quality.identical


def graph(model="FastARLoadMAR", condition="FastARClassLabel", **inputs):
    """A graph with Sweep, whose model and condition come from these nodes."""
    return {
        "1": {"class_type": model, "inputs": {**dropped(loaders.LoadMAR, dtype="fp32"), "another": 1}},
        "2": {"class_type": condition, "inputs": {"images_per_label": 2, "another": 1, **inputs}},
        "5": {"class_type": "FastARSweep", "inputs": {"model": ["1", 0], "condition": ["2", 0]}},
    }


def swept(prompt, **changes):
    node = with_hidden(sweep_nodes.SweepNode, None, prompt)
    inputs = {**SWEEP, "seeds": "7", "y": "none", "y_values": "", "model": a_mar(), **changes}
    return sweep_nodes.run(node, **inputs)[0]


def test_labels_are_an_axis_with_a_baseline_each(folder):
    few = {"y": "label", "y_values": "2; 3, 3", "x_values": "0.5, 1.01"}
    model = a_mar()
    found = swept(graph(labels="cat"), model=model, **few)
    assert found.y.values == ("2", "3") and [(cell.y, cell.x) for cell in found.cells] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len(list(folder.glob("*.png"))) == 4 + 2, "the plain sampler once for each label"
    for cell in found.cells:
        own = sharing.AnySampler.execute(
            model,
            condition=from_ids([int(found.y.values[cell.y])] * 2),
            seed=7,
            sampler=f"fasthybrid: {SWEEP['settings']}, threshold={found.x.values[cell.x]}",
        ).result[1]
        assert cell.report.conditions == own.conditions == cell.baseline.conditions
        assert cell.report.counts == own.counts


def test_checkpoints_are_an_axis_and_their_other_choices_stay(folder, monkeypatch):
    models, asked = {name: a_mar() for name in ("one.safetensors", "other.safetensors")}, []

    def load(checkpoint, **inputs):
        asked.append(inputs)
        return SimpleNamespace(result=(models[checkpoint], models[checkpoint].vae))

    monkeypatch.setattr(loaders.LoadMAR, "execute", load)
    both = {"x": "checkpoint", "x_values": ", ".join(models), "y": "label", "y_values": "2, 3"}
    found = swept(graph(), **both)
    same = {name: value for name, value in dropped(loaders.LoadMAR, dtype="fp32").items() if name != "checkpoint"}
    assert asked == [same, same]
    assert len(found.cells) == 4 and len(list(folder.glob("*.png"))) == 4 + 4, "a plain image of every model and label"
    for cell in found.cells:
        model, what = models[found.x.values[cell.x]], from_ids([int(found.y.values[cell.y])] * 2)
        line = f"fasthybrid: {SWEEP['settings']}"
        latent, _ = sharing.AnySampler.execute(model, condition=what, seed=7, sampler=line).result
        own = (model.vae.decode(latent["samples"]).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
        assert np.array_equal(found.store.read(cell.key)[0], own)


def test_prompts_are_an_axis_for_every_node_that_makes_them():
    tar = {"3": {"class_type": "FastARLoadTar", "inputs": {"checkpoint": "demo-tar"}}}
    prompt = graph(condition="FastARTarPrompt", text="old", tar=["3", 0], seed=3) | tar
    remaker = remaking.Remaker(with_hidden(sweep_nodes.SweepNode, None, prompt))
    calls = []
    nodes = {
        "FastARLoadTar": SimpleNamespace(
            define_schema=loaders.LoadTar.define_schema,
            execute=lambda **inputs: calls.append(inputs) or SimpleNamespace(result=("the language model",)),
        ),
        "FastARTarPrompt": SimpleNamespace(
            define_schema=conditioning.TarPrompt.define_schema,
            execute=lambda **inputs: calls.append(inputs) or SimpleNamespace(result=(inputs["text"],)),
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remaking, "_nodes", lambda: nodes)
        assert [remaker.made("prompt", text) for text in ("a boat, red", "a cat")] == ["a boat, red", "a cat"]
    whole = {"tar": "the language model", "seed": 3}
    assert calls == [{"checkpoint": "demo-tar"}, {**whole, "text": "a boat, red"}, {**whole, "text": "a cat"}]

    prompts = {"x": "prompt", "x_values": "a boat, red; a cat\na dog"}
    _, axis, _, _ = sweep_nodes._plan("mar", y="none", y_values="", seeds="7", settings="", **prompts)
    assert axis.values == ("a boat, red", "a cat", "a dog")
    read = conditioning.Prompt
    remaker = remaking.Remaker(
        with_hidden(sweep_nodes.SweepNode, None, graph(condition="FastARPrompt", negative="ugly", images=2))
    )
    assert digest(remaker.made("prompt", "a cat")) == digest(read.execute("a cat", "ugly", images=2).result[0])


@pytest.mark.parametrize(("prompt", "changes", "field"), [
    (None, {"x": "label", "x_values": "2"}, "condition"),
    (graph(condition="FastARPrompt"), {"x": "label", "x_values": "2"}, "condition"),
    (graph(), {"x": "prompt", "x_values": "a cat"}, "condition"),
    (graph(model="CheckpointLoaderSimple"), {"x": "checkpoint", "x_values": "demo"}, "model"),
    (graph(labels="cat", label_set=["9", 0]), {"x": "label", "x_values": "2"}, "condition"),
    (graph(), {"x": "label", "x_values": "nothing"}, "labels"),
    (graph(), {"x": "checkpoint", "x_values": "nothing"}, "checkpoint"),
    (graph(), {"x": "label", "x_values": " ,"}, "x_values"),
    (graph(), {"x": "label", "x_values": "2", "y": "prompt", "y_values": "a cat"}, "y"),
])  # fmt: skip
def test_an_axis_that_cannot_be_is_refused_before_anything_is_drawn(folder, prompt, changes, field):
    with pytest.raises(UserError, match=f"^{field}: "):
        swept(prompt, **changes)
    assert not folder.exists()


MISTAKES = [
    ("x", {"sampler": "zipar", "settings": ""}),
    ("x_values", {"x_values": "0.5, 7"}),
    ("x_values", {"x_values": ""}),
    ("y_values", {"y_values": ""}),
    ("y", {"y": "threshold"}),
    ("settings", {"settings": "threshold=0.9"}),
    ("settings", {"settings": "cfg"}),
    ("settings", {"settings": "cfg=1, cfg=2"}),
    ("seeds", {"seeds": "-3"}),
    ("x_values", {"x_values": "0..1 x 200", "y_values": "0..20"}),
    ("model", {"model": 3}),
    ("draft", {"sampler": "cspd", "x": "draft_length", "x_values": "2", "y": "none", "settings": ""}),
]


@pytest.mark.parametrize("field, changes", MISTAKES)
def test_mistakes_are_one_sentence_before_anything_is_drawn(folder, field, changes):
    with pytest.raises(UserError, match=f"^{field}: "):
        sweep(**changes)
    assert not folder.exists()


@pytest.fixture
def steady(monkeypatch):
    """A clock that goes on by 1/1024 s whenever it is read: every run of a cell takes the same seconds."""
    ticks = itertools.count()
    monkeypatch.setattr(record.time, "perf_counter", lambda: next(ticks) / 1024)


def executed(model, prompt=None, **changes):
    """Outputs of the node, what it says, and the image that it shows."""
    node = with_hidden(sweep_nodes.SweepNode, None, prompt)
    made = node.execute(model, **{**SWEEP, **SMALL, "x_values": "-1, 0.5", **changes})
    return made.result, said(made), (fake_comfy.state.saved[-1][0] * 255).round().numpy()


def test_the_node_shows_grid_plot_and_table_and_gives_them(steady):
    model = a_mar()
    (grid, table, plot), (told, *lines), shown = executed(model, cell_size=64, measure="passes")
    found, as_table = sweep(model, **{**SMALL, "x_values": "-1, 0.5"})
    assert np.array_equal((grid[0] * 255).round(), sweep_grid(found, 64))
    assert np.array_equal((plot[0] * 255).round(), sweep_plot(found, "passes"))
    width = grid.shape[2]
    assert np.array_equal(shown[: grid.shape[1], :width], (grid[0] * 255).round())
    assert np.array_equal(shown[:400, width:], (plot[0] * 255).round())
    assert table.splitlines()[0] == as_table.splitlines()[0] and told.startswith("3 cells generated")
    assert [line.split()[0] for line in lines[:-1]] == [
        "threshold",
        "-1",
        "0.5",
    ] and "passes  diffusion calls" in lines[0]
    assert lines[-1].startswith("all cells: 4 AR steps, ") and "lookahead 2" in lines[-1]
    assert "threshold" not in lines[-1]

    # A table that is connected has the same figures, and a long one does not fit.
    nodes = {"5": {"class_type": "FastARSweep", "inputs": {}}, "6": {"inputs": {"source": ["5", 1]}}}
    assert len(executed(model, nodes)[1]) == 2
    assert len(executed(model, x_values="-1..0.6 x 7")[1]) == 2 and len(executed(model, x_values="-1..0.6 x 6")[1]) == 8


def test_a_sweep_starts_where_a_new_sampler_stands():
    """At the preset of a new node, whose numbers are in the title of the grid."""
    few = {"steps": 4, "diffusion_steps": 12}
    text = ", ".join(f"{name}={value}" for name, value in few.items())
    model = a_mar()

    found, _ = sweep(model, **{**SMALL, "settings": text})
    (cell,) = found.cells
    values = {**few, "threshold": 0.5}
    _, report = sample(samplers.FastHybridSampler, model=model, preset="balanced", **values)
    assert cell.report.settings == report.settings
    assert found.title.startswith("FastHybrid, balanced: lookahead ") and "threshold" not in found.title
    assert "4 AR steps" in found.title

    named, _ = sweep(model, **{**SMALL, "settings": f"preset=custom, {text}"})
    assert named.title == "FastHybrid: 4 AR steps, 12 diffusion steps"
    plain, _ = sweep(model, **{**SMALL, "sampler": "mar", "x": "cfg", "x_values": "2", "settings": text})
    assert plain.title == "MAR: 4 AR steps, 12 diffusion steps"


def test_a_cell_becomes_a_sampler_that_generates_its_image():
    """What the node sends to the editor for its menu."""
    model = a_mar()
    found, _ = sweep(model)
    first, *_, last = sweep_nodes.as_samplers(found)
    assert (first["label"], last["label"]) == ("threshold -1, lookahead_start 0", "threshold 1.01, lookahead_start 2")
    assert len(sweep_nodes.as_samplers(found)) == 6, "of the first seed"

    assert last["node"] == "FastARFastHybridSampler"
    cell = next(cell for cell in found.cells if (cell.x, cell.y, cell.seed) == (2, 1, 7))
    _, report = samplers.FastHybridSampler.execute(model=model, condition=WHAT, **last["widgets"]).result
    assert (report.settings, report.seed) == (cell.report.settings, 7)

    both, _ = sweep(model, **{**SMALL, "sampler": "fasthybrid+lazymar"})
    (of_two,) = sweep_nodes.as_samplers(both)
    assert of_two["node"] == "FastARAnySampler" and of_two["widgets"]["seed"] == 7
    _, report = sharing.AnySampler.execute(model, WHAT, **of_two["widgets"]).result
    assert report.settings == both.cells[0].report.settings


def test_a_measure_that_no_cell_has_is_said_and_the_plot_is_against_another(steady):
    inputs = {"sampler": "mar", "settings": "steps=4, diffusion_steps=4", "x": "cfg", "x_values": "2, 3"}
    model = a_mar()
    (_, _, plot), (warning, *_), _ = executed(model, measure="acceptance", **inputs)
    assert warning == "measure: this sweep has no acceptance, so the horizontal axis shows PSNR."
    assert torch.equal(plot, executed(model, measure="auto", **inputs)[0][2])


def test_a_grid_that_does_not_fit_is_said_and_the_rest_is_shown(monkeypatch):
    """A node that needs it would not run."""
    monkeypatch.setattr(images_of_sweeps, "LONGEST", 100)
    (grid, table, plot), (warning, *_), shown = executed(a_mar())
    assert grid.message == warning == "sweep: 2 x 1 cells are too many for one image; give fewer values or seeds."
    assert len(table.splitlines()) == 4 and np.array_equal(shown, (plot[0] * 255).round())


def earlier(**changes):
    """A prompt of an earlier version."""
    nodes = {
        "1": {"class_type": "FastARSweep", "inputs": {"x": "cfg"}},
        "2": {"class_type": "FastARSweepGrid", "inputs": {"sweep": ["1", 0], "cell_size": 64}},
        "3": {"class_type": "FastARSweepPlot", "inputs": {"sweep": ["1", 0], "measure": "SSIM"}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "a"}},
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}},
        "6": {"class_type": "PreviewAny", "inputs": {"source": ["1", 1]}},
        **changes,
    }
    return {"prompt": nodes}


def test_a_prompt_with_the_nodes_of_earlier_versions_becomes_one_of_this():
    request = earlier()
    sweep_nodes.convert(request)
    assert request["prompt"] == {
        "1": {"class_type": "FastARSweep", "inputs": {"x": "cfg", "cell_size": 64, "measure": "SSIM"}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "a"}},
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["1", 2]}},
        "6": {"class_type": "PreviewAny", "inputs": {"source": ["1", 1]}},
    }
    again = json.loads(json.dumps(request))
    sweep_nodes.convert(again)
    assert again == request


@pytest.mark.parametrize("odd", [
    *(None, 3, [], {}, {"prompt": None}, {"prompt": [1]}, {"prompt": {"1": 3, "2": None}}),
    *({"prompt": {"2": {"class_type": "FastARSweepGrid", "inputs": i}}} for i in (None, {}, {"sweep": ["9", 0]})),
    {"prompt": {"1": {"class_type": "FastARSweep"}, "2": {"class_type": [1], "inputs": {"sweep": ["1", 0]}}}},
])  # fmt: skip
def test_a_request_of_another_shape_is_left_as_it_is(odd):
    before = repr(odd)
    sweep_nodes.convert(odd)
    assert repr(odd) == before


def test_a_sweep_without_inputs_is_left_to_comfyui():
    """Which refuses it."""
    request = {"prompt": {**earlier()["prompt"], "1": {"class_type": "FastARSweep"}}}
    sweep_nodes.convert(request)
    assert set(request["prompt"]) == {"1", "4", "5", "6"}


def test_a_line_comes_back():
    for line in ("mar", "fasthybrid: preset=fast, threshold=0.9", "fasthybrid+lazymar: refresh_period=4"):
        assert parse_choice(line, "sampler").text == line
    for line in ("", "nothing", "mar: top_k=3", "mar: preset=slow"):
        with pytest.raises(UserError):
            parse_choice(line, "sampler")
        assert sharing.AnySampler.validate_inputs(line) is not True


@pytest.mark.parametrize("line", ["zipar", "cspd"])
def test_samplers_that_do_not_suit_the_model(line):
    with pytest.raises(UserError, match="^(sampler|draft): "):
        sharing.AnySampler.execute(a_mar(), WHAT, line, 7)


def with_hidden(node: type, metadata, prompt=None) -> type:
    """The node as ComfyUI executes it: a class with its hidden inputs."""
    return type("Executed", (node,), {"hidden": SimpleNamespace(unique_id="5", extra_pnginfo=metadata, prompt=prompt)})


PLAIN = {"preset": "custom", "steps": 4, "diffusion_steps": 4, "cfg": 2.0}
FAST = {**PLAIN, "lookahead": 2, "threshold": -1.0, "guided_steps": 2}


def said(output) -> list[str]:
    """Lines that a node shows after a run."""
    return output.ui["fastar_text"][0].split("\n")


def test_samplers_show_a_line_and_write_their_report():
    metadata = {"workflow": {"nodes": []}}
    node = with_hidden(samplers.FastHybridSampler, metadata)
    made = node.execute(model=a_mar(), condition=WHAT, seed=7, **FAST)
    report = made.result[1]
    first, second = said(made)
    work = (
        f"4 passes, {report.counts['head_calls']} diffusion calls, {100 * report.acceptance:.0f} % of drafts accepted"
    )
    assert first.startswith(f"{work}, ") and first.endswith(" s (first run)") and second.startswith("4 AR steps, ")
    assert not fake_comfy.state.said, "the editor removes progress texts when a run ends"
    (run,) = metadata[exchange.KEY]["runs"]
    assert run["node"] == "5" and run["settings"] == report.settings and metadata["workflow"] == {"nodes": []}
    json.dumps(metadata)
    warning, figures, settings = said(node.execute(model=a_mar(), condition=WHAT, seed=7, **{**PLAIN, "lookahead": 0}))
    assert warning.startswith("No draft could be") and " s (" in figures and settings.startswith("4 AR steps, ")
    plain = with_hidden(samplers.MARSampler, None)  # a prompt that holds no graph
    figures, settings = said(plain.execute(model=a_mar(), condition=WHAT, seed=7, **PLAIN))
    assert figures.startswith("4 passes, ") and settings.startswith("4 AR steps, ")


def test_values_that_stand_for_the_models_own_are_no_settings():
    """In a preset, where they come over links, in a line and in a sweep; the line of a saved run leaves them out."""
    model = a_gpt()
    report = samplers.LlamaGenSampler.execute(model=model, condition=WHAT, seed=7, preset="recommended").result[1]
    line = sharing.line_of(report)[0]
    assert sharing.AnySampler.execute(model, WHAT, line, 7).result[1].settings == report.settings and "-1" not in line
    for name, value in (("cfg", 0), ("cfg", 0.5), ("top_k", -1), ("cfg_interval", -1)):
        with pytest.raises(UserError, match=f"^{name}: .* is outside"):
            given = {"preset": "custom", name: value}
            samplers.LlamaGenSampler.execute(model=model, condition=WHAT, seed=7, **given)
        with pytest.raises(UserError, match=f"^{name}: .* is outside"):
            sharing.AnySampler.execute(model, WHAT, f"llamagen: {name}={value}", 7)
        with pytest.raises(UserError, match=f"{name}: .* is outside"):
            sweep(model, **SMALL | {"sampler": "llamagen", "settings": "", "x": name, "x_values": str(value)})


def test_no_picture_outside_of_comfyuis_folders_is_opened(tmp_path):
    """The stand-in joins names and checks nothing, like ComfyUI 0.27."""
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    (tmp_path / "input" / "folder.png").mkdir()
    names = ("../secret.png", str(secret), "sub/../../secret.png", "folder.png", "", "a\0b.png", "x" * 5000 + ".png")
    for name in (*names, "gone.png"):
        assert sharing.LoadReport.validate_inputs(name) is not True
        with pytest.raises(UserError, match="^image: "):
            sharing.LoadReport.execute(name)
    (tmp_path / "input" / "empty.png").touch()
    for kind in ("GIF", "TIFF"):
        Image.new("RGB", (8, 8)).save(tmp_path / "input" / f"{kind}.png", kind)
    for name in ("GIF.png", "TIFF.png", "empty.png"):
        with pytest.raises(UserError, match="^image: "):
            sharing.LoadReport.execute(name)


def test_the_advisor_answers_with_a_line_that_runs(monkeypatch):
    lines = ("fasthybrid: steps=4, diffusion_steps=4", "mar: steps=2, diffusion_steps=2", "lazymar: steps=99")
    monkeypatch.setattr(advisor, "candidates", lambda *_: [parse_choice(line, "sampler") for line in lines])
    model = a_mar()
    model.recommended = {"steps": 8, "diffusion_steps": 8}
    node = with_hidden(advisor.Advisor, {})
    answered = []
    grid = advisor.compare_grid
    monkeypatch.setattr(
        advisor, "compare_grid", lambda images, *a, **k: answered.extend(images) or grid(images, *a, **k)
    )
    made = node.execute(model, WHAT, 7, measure="PSNR", least_psnr=0.0, repeats=2)
    line, table, image = made.result
    assert image.ndim == 4 and image.shape[3] == 3
    assert line in (*lines[:2], "mar") and "lazymar: steps=99 was not run" in table
    assert len([row for row in table.splitlines() if row.startswith("| ")]) == 4
    used = [] if line == "mar" else [f"In your workflow, use the node Any Sampler with the text {line}."]
    assert said(made) == [table.splitlines()[0], *used]
    assert fake_comfy.state.said[0][1].startswith("run 1 of about "), "while it runs"
    _, shown, _ = fake_comfy.Progress.updates[-1][2]
    sheet, _ = preview._enlarged(answered[-1])
    assert np.array_equal(np.asarray(shown), sheet), "the preview that stays is of the answer"
    assert sharing.AnySampler.execute(model, WHAT, line, 7).result[1].sampler == line.partition(":")[0]


def test_nodes_that_the_advisor_names_exist_and_have_the_preset():
    """Of every candidate that is a preset."""
    nodes = {}
    for node in samplers.NODES:
        about = node.define_schema()
        presets = [i.about["options"] for i in about.inputs if i.id == "preset"]
        nodes[about.display_name] = presets[0] if presets else []

    for plain in [*(name for name, entry in SAMPLERS.items() if entry.baseline), "par"]:
        for choice in advice.candidates(plain, draft=True):
            said, _, preset = advisor._in_a_graph(choice, plain).partition(" with preset ")
            if preset:
                name = preset.split(",")[0].rstrip(".")
                assert name in nodes[said.removeprefix("In your workflow, use ")]
                assert "LazyMAR Cache" not in preset or name in nodes["LazyMAR Cache"]


def test_a_cell_of_another_format_is_not_overwritten(folder):
    """A newer version wrote it into the same folder; a damaged cell is made again."""
    model = a_mar()
    sweep(model, **SMALL)
    cell = sorted(folder.glob("*.png"))[0]
    with Image.open(cell) as shown:
        record, shown = json.loads(shown.text["fastar"]), shown.copy()
    about = PngInfo()
    about.add_text("fastar", json.dumps({**record, "version": 2}))
    shown.save(cell, pnginfo=about)
    newer = cell.read_bytes()
    with pytest.raises(UserError, match="^folder: .*a different version of FastAR; choose a different"):
        sweep(model, **SMALL)
    assert cell.read_bytes() == newer
    sweep(model, **SMALL, folder="another")  # the remedy
    cell.write_bytes(newer[:100])
    sweep(model, **SMALL)
    assert json.loads(Image.open(cell).text["fastar"])["version"] == 1


BAD_PICTURE = "![a](http://one.example/a.png)"
BAD_TAG = '<img src="http://two.example/b.png">'


def test_a_strangers_picture_adds_no_markup(tmp_path, monkeypatch):
    """Names, labels and settings of its reports are in tables, node texts and lines for Any Sampler."""
    run = {
        "model": BAD_TAG,
        "seed": 1,
        "images": 1,
        "seconds": 2.0,
        "counts": {"transformer_passes": 4},
        "note": BAD_PICTURE,
    }
    runs = [
        run | {"sampler": "mar", "label": BAD_PICTURE, "settings": {"steps": 4}},
        run | {"sampler": "mar", "label": BAD_TAG, "settings": {"order": BAD_PICTURE}},
        run | {"sampler": f"{BAD_TAG} | x", "settings": {BAD_TAG: BAD_PICTURE}, "seconds": 5.0},
    ]
    about = PngInfo()
    about.add_text("fastar", json.dumps({"version": 1, "runs": runs}))
    Image.new("RGB", (16, 16)).save(tmp_path / "input" / "a.png", pnginfo=about)
    monkeypatch.setattr(
        compare.Compare, "hidden", SimpleNamespace(unique_id="7", extra_pnginfo={}, prompt={}), raising=False
    )

    image, reports, table, lines = sharing.LoadReport.execute("a.png").result
    texts = [compare.ReportToText.execute(report, format="text").result[0] for report in reports]
    pair = {"image_1": [image] * 3, "report_1": reports, "columns": [0], "baseline": [1]}
    _, compared, _ = compare.Compare.execute([f"{BAD_PICTURE}\n\nhttps://three.example"], **pair).result

    assert "one.example" in compared
    for text in (table, compared, *texts, *lines):
        assert not re.search(r"[<\[`]|://", text), text
    assert all(line.count("|") == table.splitlines()[0].count("|") for line in table.splitlines())
    assert lines[0] == "mar: steps=4" and lines[1] == "mar"


def test_a_sweep_says_how_many_cells_it_found(monkeypatch):
    monkeypatch.setattr(
        sweep_nodes.SweepNode, "hidden", SimpleNamespace(unique_id="7", prompt={}, extra_pnginfo=None), raising=False
    )
    model = a_mar()

    def told(**changes):
        return said(sweep_nodes.SweepNode.execute(model, **{**SWEEP, **SMALL, **changes}))[0]

    assert told() == "2 cells generated, including the unaccelerated sampler's cells, in the new folder sweep"
    assert fake_comfy.state.said == [("7", "cell 1 of 2"), ("7", "cell 2 of 2")], "while it runs"
    assert told(x_values="0.5, 0.6") == "2 of 3 cells were in the folder sweep already"
    assert told(x_values="0.7, 0.8") == "1 of 3 cells was in the folder sweep already"


def test_seeds_of_a_sweep_reach_the_limit():
    plan = {"sampler": "fasthybrid", "x": "threshold", "y": "none", "x_values": "0.5", "y_values": "", "settings": ""}
    assert sweep_nodes._plan(**plan, seeds=str(2**64 - 1))[3] == [2**64 - 1]
    with pytest.raises(UserError, match="^seeds: "):
        sweep_nodes._plan(**plan, seeds=str(2**64))
