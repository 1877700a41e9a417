"""Values on sockets are recognised by what docs/sockets.md says of them, whatever their class."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import compare, conditioning, host, running, samplers, sockets, sweep
from fastar_nodes.nodes import sample as sample_for_others
from fastar_nodes.samplers.conditioning import (
    MAKERS,
    CodeCondition,
    Condition,
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


def described() -> dict[str, str]:
    """Kind to what the page says of it."""
    page = (ROOT / "docs" / "sockets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\| \*([a-z ]+)\* \| (.+) \|$", page, re.MULTILINE)
    return dict(rows)


VALUES = (Condition, sockets.LabelText, PromptCondition, ImagePromptCondition, TextCondition, CodeCondition)
VALUES += (host.Loaded, compare.Report, running.CachePlan, sweep.Sweep)


def test_the_page_has_every_kind_with_its_version_and_attributes_that_exist():
    assert {cls.kind for cls in VALUES} == set(described())
    for cls in VALUES:
        assert cls.fastar_version == sockets.VERSION == 1
        known = {field.name for field in fields(cls)} | set(dir(cls))
        known |= {"name", "family", "condition", "label_set"} if cls is host.Loaded else {"str"}
        named = set(re.findall(r"`(\w+)(?:\(\w+\))?`", described()[cls.kind]))
        assert named <= known, cls
        if cls not in (
            sweep.Sweep,
            host.Loaded,
            compare.Report,
            running.CachePlan,
        ):  # whose other parts are not promised
            own = {field.name for field in fields(cls)} - {"read"}  # which the model of a sampler fills in
            assert own <= named, cls


CONDITIONS = {
    "class": (value("class", labels=[1, 2], names=["one", "two"], label_set=""), Condition((1, 2), ("one", "two"))),
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


def test_labels_of_another_class_draw_the_same_image():
    model = a_mar()
    ours, _ = sample(samplers.MARSampler, model=model)
    theirs, _ = sample(samplers.MARSampler, model=model, condition=CONDITIONS["class"][0])
    assert torch.equal(ours, theirs)


REFUSED = {
    "an attribute is missing": (
        value("class", names=["x"]),
        "its value of the kind class lacks labels; ask the author",
    ),
    "an entry of another kind": (
        value("class", labels=["cat"], names=["cat"]),
        "labels of its class labels are not whole numbers",
    ),
    "a truth value": (value("class", labels=[True], names=["x"]), "are not whole numbers"),
    "fewer names": (value("class", labels=[1, 2], names=["x"]), "a text in names for each of 2 images"),
    "no list": (value("prompt", texts="a cat"), "texts of its prompts is not a list"),
    "another shape": (value("text", features=[TENSOR[0]], names=["x"]), "are not float tensors"),
    "another dtype": (value("codes", codes=[TENSOR[0]], names=["x"]), "are not int64 tensors"),
    "pixels of another dtype": (
        value("image prompt", texts=["night"], images=[PIXELS.float()]),
        "must have a uint8 tensor",
    ),
    "a newer version": (replace(Condition((1,), ("x",))), "came from a newer FastAR"),
    "another kind": (value("report"), "connect the output of Class Label, Prompt"),
    "without a version": (SimpleNamespace(kind="class", labels=[1], names=["x"]), "connect the output of Class Label"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_as_the_page_says_is_refused_in_a_sentence(what, monkeypatch):
    given, words = REFUSED[what]
    if what == "a newer version":
        monkeypatch.setattr(Condition, "fastar_version", 2)
    with pytest.raises(UserError, match=f"^condition: .*{words}"):
        sample(samplers.MARSampler, model=a_mar(), condition=given)


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
@pytest.mark.fast_cases("MAR", "LlamaGen")
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
    _, ours = sample(samplers.MARSampler, steps=8, model=model, cache=running.CachePlan("custom", values))
    plan = copy("nodes.running").CachePlan("custom", values)
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
    assert told == "{'fastar_nodes'} <class 'fastar_nodes.samplers.conditioning.Condition'>\n" and "FastAR" not in log


def test_a_name_that_another_copy_has_is_left_to_it():
    told, log = registered(taken="/elsewhere/fastar_nodes/__init__.py")
    assert told == "{'/comfy/custom_nodes/fastar-nodes'} None\n"
    assert "other packs import fastar_nodes from /elsewhere/fastar_nodes/__init__.py, ComfyUI runs" in log


# ------------------------------------------------------------------------------------------------ types of conditions


# What each sampler's condition may be: what the models of its families read.
TAKEN = {
    "PARSampler": "FASTAR_LABELS,FASTAR_TEXT",
    "MuLoSDSampler": "FASTAR_LABELS,FASTAR_TEXT,FASTAR_CODES",
    **dict.fromkeys(
        ["LlamaGenSampler", "ZipARSampler"],
        "FASTAR_LABELS,FASTAR_PROMPT,FASTAR_IMAGE_PROMPT,FASTAR_TEXT,FASTAR_CODES",
    ),
}


def socket(node: Any, name: str) -> str:
    """Type of an input."""
    (found,) = [part.kind for part in node.define_schema().inputs if part.id == name]
    return found


def test_a_samplers_condition_has_the_types_that_its_models_read():
    nodes = [node for node in samplers.NODES if node is not samplers.LazyMARCache]
    assert set(TAKEN) < {node.__name__ for node in nodes}
    for node in nodes:
        assert socket(node, "condition") == TAKEN.get(node.__name__, "FASTAR_LABELS,FASTAR_PROMPT"), node


def test_the_type_of_a_condition_is_that_of_its_kind_on_the_page():
    """The node that makes a kind, as messages name it, has the kind's type."""
    page = (ROOT / "docs" / "sockets.md").read_text(encoding="utf-8")
    types = {kind: socket for socket, kind in re.findall(r"^\| (FASTAR_[A-Z_]+) \| \*([a-z ]+)\* ", page, re.MULTILINE)}
    for node in conditioning.NODES:
        about = node.define_schema()
        (made,) = [part.kind for part in about.outputs]
        kinds = [kind for kind, names in MAKERS.items() if about.display_name.partition(" (")[0] in names.split(" or ")]
        assert {types.get(kind, "FASTAR_CODES") for kind in kinds} == {made}, node


@pytest.mark.parametrize("node", [samplers.CSpDSampler, samplers.MuLoSDSampler])
def test_the_target_comes_before_the_draft(node):
    assert [part.id for part in node.define_schema().inputs][:3] == ["target", "draft", "condition"]
