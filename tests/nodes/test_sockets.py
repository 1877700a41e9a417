"""Values on sockets are recognised by what docs/sockets.md says of them, whatever their class."""

import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import caches, compare, conditioning, editing, samplers, sockets, timelapse
from fastar_nodes.nodes import sample as sample_for_others
from fastar_nodes.samplers.conditioning import (
    MAKERS,
    ClassCondition,
    CodeCondition,
    ImagePromptCondition,
    PromptCondition,
    TextCondition,
)
from graphs import default
from tiny import SHORT, a_mar, a_report, dropped, sample

ROOT = Path(__file__).resolve().parents[2]
COPY = "a_second_copy_of_the_pack"
TENSOR = torch.ones(3, 4)
PIXELS = torch.zeros(2, 3, 3, dtype=torch.uint8)


def value(kind: str, version: int = 1, **attributes: Any) -> Any:
    """A value of another pack's own class."""
    return SimpleNamespace(kind=kind, fastar_version=version, **attributes)


CONDITIONS = {
    "class": (
        value("class", labels=[1, 2], names=["one", "two"], label_set=""),
        ClassCondition((1, 2), ("one", "two")),
    ),
    "label text": (value("label text", text="1, 2", repeat=2), sockets.LabelText("1, 2", 2)),
    "prompt": (value("prompt", texts=["a cat"]), PromptCondition(("a cat",))),
    "image prompt": (
        value("image prompt", texts=["make it night"], images=[PIXELS], freedom=3.0),
        ImagePromptCondition(("make it night",), (PIXELS,), 3.0),
    ),
    "text": (value("text", features=(TENSOR,), names=("a cat",)), TextCondition((TENSOR,), ("a cat",))),
    "codes": (
        value("codes", codes=[torch.arange(9)], names=["a cat"], size=16),
        CodeCondition((torch.arange(9),), ("a cat",), 16),
    ),
}


@pytest.mark.parametrize("kind", CONDITIONS)
def test_a_condition_of_another_class_becomes_ours(kind):
    theirs, ours = CONDITIONS[kind]
    made = sockets.expect_condition(theirs, "Class Label")
    assert type(made) is type(ours)
    for field in fields(ours):
        was, now = getattr(ours, field.name), getattr(made, field.name)
        assert type(was) is type(now)
        same = zip(was, now, strict=True) if isinstance(was, tuple) else [(was, now)]
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in same)


NAN = torch.full((3, 4), torch.nan)
CODES = torch.arange(9)
# Values of a kind, as the page describes it.
LABELS = {"labels": [1], "names": ["one"]}
TEXT = {"text": "cat", "repeat": 1}
EDIT = {"texts": ["night"], "images": [PIXELS]}
ROWS = {"features": [TENSOR], "names": ["a cat"]}
SEMANTIC = {"codes": [CODES], "names": ["a cat"]}

# Kind, its attributes, and the one that is wrong with its value.
WRONG = [
    ("class", LABELS, {"labels": ["cat"]}),
    ("class", LABELS, {"labels": [True]}),
    ("class", LABELS, {"labels": [3.0]}),
    ("class", LABELS, {"labels": [-1]}),
    ("class", LABELS, {"labels": [10**400]}),
    ("class", LABELS, {"labels": torch.tensor([1])}),
    ("class", LABELS, {"labels": None}),
    ("class", LABELS, {"names": None}),
    ("class", LABELS, {"names": []}),
    ("class", LABELS, {"label_set": 3}),
    ("label text", TEXT, {"text": 3}),
    ("label text", TEXT, {"text": "x" * 30000}),
    ("label text", TEXT, {"repeat": "2"}),
    ("label text", TEXT, {"repeat": 0}),
    ("label text", TEXT, {"repeat": 10**9}),
    ("prompt", {"texts": ["a cat"]}, {"texts": "a cat"}),
    ("prompt", {"texts": ["a cat"]}, {"unconditional": None}),
    ("image prompt", EDIT, {"texts": [3]}),
    ("image prompt", EDIT, {"images": []}),
    ("image prompt", EDIT, {"images": [PIXELS.float()]}),
    ("image prompt", EDIT, {"images": [PIXELS[:0]]}),
    ("image prompt", EDIT, {"images": [PIXELS.to("meta")]}),
    ("image prompt", EDIT, {"freedom": -1.0}),
    ("image prompt", EDIT, {"freedom": 10.1}),
    ("image prompt", EDIT, {"freedom": float("nan")}),
    ("image prompt", EDIT, {"freedom": float("inf")}),
    ("image prompt", EDIT, {"freedom": "5"}),
    ("image prompt", EDIT, {"freedom": torch.tensor(5.0)}),
    ("text", ROWS, {"features": [TENSOR[0]]}),
    ("text", ROWS, {"features": [NAN]}),
    ("text", ROWS, {"features": [TENSOR.to_sparse()]}),
    ("features", ROWS, {"features": [TENSOR.to(torch.complex64)]}),
    ("codes", SEMANTIC, {"codes": [TENSOR[0]]}),
    ("codes", SEMANTIC, {"codes": [CODES.bool()]}),
    ("codes", SEMANTIC, {"size": -1}),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), WRONG)
def test_an_attribute_of_a_condition_is_checked_for_type_and_range(kind, right, wrong):
    sockets.expect_condition(value(kind, **right), "Class Label")
    (name,) = wrong
    with pytest.raises(
        UserError, match=f"^condition: the attribute '{name}' must .*; report this to the author of the node"
    ) as told:
        sample(samplers.MARSampler, model=a_mar(), condition=value(kind, **{**right, **wrong}))
    assert len(str(told.value)) < 250


REFUSED = {
    "an attribute is missing": (
        value("class", names=["x"]),
        "FastAR class lacks the attribute 'labels', which must be a list of whole numbers from 0; report this to the",
    ),
    "names are missing": (value("class", labels=[1]), "lacks the attribute 'names', which must be a list of texts; "),
    "a newer version": (replace(ClassCondition((1,), ("x",))), "comes from a newer version of FastAR"),
    "another kind": (value("report"), "it got a report; connect the output of Class Label, Prompt"),
    "without a version": (
        SimpleNamespace(kind="class", labels=[1], names=["x"]),
        "this object says that it is a FastAR class, but its attribute 'fastar_version' is not a whole number of 1 or "
        "more; "
        "report this",
    ),
    "a version that is none": (value("class", version="1", **LABELS), "'fastar_version' is not a whole number"),
    "a version below 1": (value("class", version=0, **LABELS), "'fastar_version' is not a whole number"),
    "no image": (value("class", labels=[], names=[]), "the attribute 'labels' is an empty list"),
    "a kind that is none": (value("cats"), "of the class SimpleNamespace.*; connect the output of Class Label"),
    "neither": (object(), "an object of the class object, which has no attribute fastar_version; connect the output"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_as_the_page_says_is_refused_in_a_sentence(what, monkeypatch):
    given, words = REFUSED[what]
    if what == "a newer version":
        monkeypatch.setattr(ClassCondition, "fastar_version", 2)
    with pytest.raises(UserError, match=f"^condition: .*{words}"):
        sample(samplers.MARSampler, model=a_mar(), condition=given)


def test_lists_in_a_condition_of_our_class_become_tuples():
    """A pack may make one of ours with lists, of which the sampler takes the images of a batch."""
    made = sockets.expect_condition(ClassCondition([1, 2], ["one", "two"]), "Class Label")
    assert made == ClassCondition((1, 2), ("one", "two")) and made.for_images([1]) == ClassCondition((2,), ("two",))


STEP = np.zeros((1, 8, 8), np.int32)
REPORT: dict[str, Any] = {
    "sampler": "mar",
    "model": "x",
    "settings": {"steps": 2},
    "seed": 1,
    "images": 1,
    "device": "cpu",
    "seconds": 1.0,
    "phases": {"head": 0.5},
    "counts": {"transformer_passes": 2},
    "acceptance": None,
    "dtype": "fp32",
    "grid": [8, 8],
    "maps": {"step": STEP, "outcome": STEP.astype(np.uint8)},
}
OF_REPORTS = {
    "maps": [
        1,
        {"outcome": STEP + 8},
        {"cached": STEP - 1},
        {"step": STEP - 2},
        {"step": STEP + (1 << 21)},
        {"step": [[0]]},
        {"step": STEP[0]},
        {"step": STEP.astype(float)},
        {"step": np.zeros((3, 8, 8), int)},
    ],
    "settings": [[1], {1: 2}, {"cfg": [1]}, {"cfg": float("nan")}, {"cfg": 10**400}],
    "seconds": ["1", -1.0, float("nan"), float("inf"), None, True],
    "dtype": [{1: 2}, None],
    "model": [0, ""],
    "counts": [[], {"head_rows": 1.5}, {"head_rows": -1}],
    "images": ["1", 0, 1.0],
    "grid": [None, 8, [0, 8], "88", [1, 2, 3]],
    "phases": [3, {"head": "x"}],
    "acceptance": ["x", 2.0],
    "sampler": [None, ""],
    "seed": ["x", -1, 1 << 64],
    "device": [3],
}


@pytest.mark.parametrize("name", OF_REPORTS)
def test_an_attribute_of_a_report_is_checked_for_type_and_range(name):
    for wrong in OF_REPORTS[name]:
        given = value("report", **{**REPORT, name: wrong})
        for node, values in ((compare.ReportToText, {"format": "json"}), (compare.TokenMap, {"what": "outcome"})):
            with pytest.raises(UserError, match="^report: the (attribute|map) .*; report this to the author"):
                node.execute(report=given, **values)


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_a_report_of_another_class_is_written_in_every_form(form):
    given = value("report", **REPORT)
    assert "mar" in compare.ReportToText.execute(report=given, format=form).result[0]
    assert compare.TokenMap.execute(report=given, what="fixed at step", opacity=1.0).result[0].shape[0] == 1


def test_a_report_without_a_decided_token_makes_no_animation():
    given = value("report", **{**REPORT, "maps": {"step": STEP - 1}})
    with pytest.raises(UserError, match="does not say in which step each token"):
        timelapse.TimeLapse.execute("x", 1.0, image_1=torch.zeros(1, 8, 8, 3), report_1=given)


OF_CACHES = [
    ({"values": [1]}, "cache: the attribute 'values' must be a dictionary"),
    ({"preset": 3}, "cache: the attribute 'preset' must be one of balanced, fast, exact, custom, but is the number 3"),
    ({"preset": "quick"}, "cache: the attribute 'preset' must be .* is the text 'quick'"),
    ({"values": {"refresh_period": 0}}, "cache: the settings of LazyMAR Cache do not fit .*refresh_period: 0 is"),
    ({"values": {"period": 3}}, "cache: the settings of LazyMAR Cache do not fit .*period"),
]


@pytest.mark.parametrize(("wrong", "words"), OF_CACHES)
def test_an_attribute_of_a_cache_is_checked_for_type_and_range(wrong, words):
    given = value("cache", **{"preset": "balanced", "values": {}, **wrong})
    with pytest.raises(UserError, match=f"^{words}"):
        sample(samplers.MARSampler, model=a_mar(), cache=given)


OWN = {
    "model": (lambda given: sample(samplers.MARSampler, model=given), "Load MAR"),
    "tar": (lambda given: conditioning.TarPrompt.execute(tar=given, text="a cat", seed=1), "Load Tar"),
    "crop": (lambda given: editing.PasteInpaintedArea.execute(given, torch.zeros(1, 8, 8, 3)), "Crop around Mask"),
}


@pytest.mark.parametrize("field", OWN)
def test_what_no_other_pack_can_make_is_of_our_class(field):
    """Whatever its attributes: its networks and files are not on the page."""
    run, source = OWN[field]
    with pytest.raises(UserError, match=f"^{field}: this object says .* no FastAR node made it; connect .* {source}"):
        run(value("model" if field == "tar" else field, **vars(a_mar())))
    with pytest.raises(UserError, match=f"^{field}: it got a report; connect the output of {source}"):
        run(a_report("mar"))


def test_a_model_whose_parts_were_changed_is_refused():
    for name, wrong in {"vae": 3, "recommended": [1]}.items():
        model = a_mar()
        setattr(model, name, wrong)
        with pytest.raises(UserError, match=f"^model: the attribute '{name}' must be"):
            sample(samplers.MARSampler, model=model)


def test_other_packs_draw_on_the_values_of_sockets():
    model = a_mar()
    ours, report = sample(samplers.MARSampler, model=model, seed=9)
    line = "mar: steps=4, diffusion_steps=4"
    latent, told = sample_for_others(model, CONDITIONS["class"][0], line, seed=9)
    assert torch.equal(latent["samples"], ours) and told.counts == report.counts and told.seed == 9

    with pytest.raises(UserError, match="^model: it got nothing; connect the output of Load MAR"):
        sample_for_others(None, CONDITIONS["class"][0])
    with pytest.raises(UserError, match="^draft: cspd needs a draft model"):
        sample_for_others(model, CONDITIONS["class"][0], "cspd")


# ------------------------------------------------------------------------------------------------ a second import


@pytest.fixture(scope="module")
def copy():
    """Modules of the package by name, imported once more: no class of it is one of ours."""
    spec = spec_from_file_location(COPY, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    sys.modules[COPY] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[COPY])
    yield lambda name: import_module(f"{COPY}.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == COPY]:
        del sys.modules[name]


def loaded(loaders: Any, node: str) -> Any:
    """The model of a loader node of a copy, from its widgets' defaults."""
    cls = next(cls for cls in loaders.NODES if cls.__name__ == node)
    values = {widget.id: default(widget) for widget in cls.define_schema().inputs}
    return cls.execute(**{**values, "dtype": "fp32"}).result[0]


def few(sampler: str) -> dict[str, Any]:
    """Inputs of a sampler that draws in a second."""
    return {"seed": 7, "preset": "custom", "width": 64, "height": 64, **({} if sampler == "LlamaGenSampler" else SHORT)}


# Loader, sampler, condition node and its inputs, for a model of every demo.
DRAWN = {
    "MAR": ("LoadMAR", "FastHybridSampler", "ClassLabel", {"labels": "cat"}),
    "Harmon": ("LoadHybrid", "MARSampler", "Prompt", {"text": "a red boat"}),
    "LlamaGen": ("LoadLlamaGen", "LlamaGenSampler", "ClassLabel", {"labels": "cat"}),
    "BitDance": ("LoadBitDance", "BitDanceSampler", "ClassLabel", {"labels": "cat"}),
}


@pytest.mark.parametrize("family", DRAWN)
@pytest.mark.fast_cases("MAR")
def test_model_and_condition_of_a_second_import_draw_the_same_image(copy, family):
    loader, sampler, maker, inputs = DRAWN[family]

    def draw(module: Any) -> torch.Tensor:
        model = loaded(module("nodes.loaders"), loader)
        make = getattr(module("nodes.conditioning"), maker)
        (condition, *_) = make.execute(**dropped(make, **inputs)).result
        node = getattr(samplers, sampler)  # always ours
        about = dropped(node, model=model, condition=condition, **few(sampler))
        known = {part.id for part in node.define_schema().inputs}
        latent, report = node.execute(**{name: value for name, value in about.items() if name in known}).result
        assert type(report) is compare.Report
        return latent["samples"]

    def ours(name: str) -> Any:
        return import_module(f"fastar_nodes.{name}")

    assert torch.equal(draw(copy), draw(ours))


def test_tars_language_model_of_a_second_import_writes_the_same_codes(copy):
    def write(module: Any) -> Any:
        tar = loaded(module("nodes.loaders"), "LoadTar")
        node = conditioning.TarPrompt
        return node.execute(**dropped(node, tar=tar, text="a red boat", seed=3)).result[0]

    (theirs,), (ours,) = write(copy).codes, write(lambda name: import_module(f"fastar_nodes.{name}")).codes
    assert torch.equal(theirs, ours)


def test_caches_and_reports_of_a_second_import_are_taken(copy):
    model = a_mar()
    values = {"refresh_period": 3, "start_step": 1}
    _, ours = sample(samplers.MARSampler, steps=8, model=model, cache=caches.CachePlan("custom", values))
    plan = copy("nodes.caches").CachePlan("custom", values)
    _, theirs = sample(samplers.MARSampler, steps=8, model=model, cache=plan)
    assert theirs.sampler == "lazymar" and theirs.settings["refresh_period"] == 3 and theirs.counts == ours.counts

    report = a_report("mar", seconds=2.0)
    record = copy("reports.record").Report
    twin = record(**{field.name: getattr(report, field.name) for field in fields(record)})
    assert not isinstance(twin, compare.Report)
    for form in ("text", "json", "csv"):
        texts = [compare.ReportToText.execute(one, format=form).result[0] for one in (report, twin)]
        assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------------------ the name fastar_nodes


# Argument: the checkout. ComfyUI's loader imports a folder under its path.
LOADED = """
import asyncio, sys
from importlib.util import module_from_spec, spec_from_file_location
root, taken = sys.argv[1:]
sys.path.insert(0, root + "/tests/lib")
import fake_comfy
fake_comfy.install()
fake_comfy.sys.modules["folder_paths"].folder_names_and_paths["fastar"] = ([], set())
from types import ModuleType
if taken:
    sys.modules["fastar_nodes"] = ModuleType("fastar_nodes")
    sys.modules["fastar_nodes"].__file__ = taken
spec = spec_from_file_location("/comfy/custom_nodes/fastar-nodes", root + "/__init__.py")
sys.modules[spec.name] = module = module_from_spec(spec)
spec.loader.exec_module(module)
nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())
import fastar_nodes
assert {node.__module__ for node in nodes} == {spec.name}  # as of any other pack
code = {node.define_schema.__func__.__module__.rpartition(".nodes.")[0] for node in nodes}
print(code, getattr(fastar_nodes, "Condition", None))
"""


def registered(taken: str = "") -> tuple[str, str]:
    """What a process says that loads the pack as ComfyUI does, and its log."""
    command = [sys.executable, "-B", "-c", LOADED, str(ROOT), taken]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_other_packs_import_the_copy_that_comfyui_runs():
    told, log = registered()
    assert (
        told == "{'fastar_nodes'} <class 'fastar_nodes.samplers.conditioning.ClassCondition'>\n" and "FastAR" not in log
    )


@pytest.mark.slow
def test_a_name_that_another_copy_has_is_left_to_it():
    told, log = registered(taken="/elsewhere/fastar_nodes/__init__.py")
    assert told == "{'/comfy/custom_nodes/fastar-nodes'} None\n"
    assert "other packs import fastar_nodes from /elsewhere/fastar_nodes/__init__.py, but ComfyUI runs" in log


# ------------------------------------------------------------------------------------------------ types of conditions


def test_the_type_of_a_condition_is_that_of_its_kind_in_the_table():
    """The node that makes a kind, as messages name it, has the kind's type."""
    for node in conditioning.NODES:
        about = node.define_schema()
        (made,) = [part.kind for part in about.outputs]
        kinds = [kind for kind, names in MAKERS.items() if about.display_name in names.split(" or ")]
        assert {types for kind in kinds for types in sockets.VALUES[kind].sockets} == {made}, node
