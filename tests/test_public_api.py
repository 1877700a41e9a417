"""The names that scripts import: complete, typed, and quick to refuse one that is misspelt."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import fastar_nodes
import pytest
from fastar_nodes.errors import UserError, did_you_mean, unknown
from fastar_nodes.runs.registry import SAMPLERS

ROOT = Path(__file__).resolve().parents[1]


def public() -> dict[str, str]:
    """Names that ``api.py`` imports, with their modules."""
    found = {}
    for statement in ast.parse((ROOT / "api.py").read_text(encoding="utf-8")).body[1:]:
        for alias in statement.names:
            assert alias.asname == alias.name, "without `as` it is private to a type checker"
            found[alias.name] = statement.module
    return found


def test_what_type_checkers_see_is_what_there_is_at_run_time():
    """Type checkers read api.py, and scripts ask the package."""
    assert len(public()) > 50 and {"load", "Pipeline", "UserError", "SAMPLERS", "presets"} < set(public())
    for name, module in public().items():
        value = getattr(fastar_nodes, name)
        home = importlib.import_module(f"fastar_nodes.{module}")
        assert value is getattr(home, name) and name in dir(fastar_nodes)
        assert value is getattr(importlib.import_module("fastar_nodes.api"), name)


def test_the_function_and_the_settings_of_a_public_sampler_are_the_registrys():
    """A script may name either; of a sampler without names of its own, SAMPLERS has them."""
    named = [entry for entry in SAMPLERS.values() if entry.run.__name__ in public()]
    assert {entry.name for entry in named} >= {"mar", "fasthybrid", "llamagen", "zipar", "bitdance"}
    for entry in named:
        assert getattr(fastar_nodes, entry.run.__name__) is entry.run
        assert getattr(fastar_nodes, entry.settings.__name__) is entry.settings


def test_other_names_are_refused():
    assert fastar_nodes.WEB_DIRECTORY == "./web"
    for name in ("nosuch", "NODE_CLASS_MAPPINGS", "__wrapped__", "_cspd"):
        with pytest.raises(AttributeError, match=f"^module 'fastar_nodes' has no attribute '{name}'$"):
            getattr(fastar_nodes, name)


MISSPELT = """
import importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    "fastar_nodes", root + "/__init__.py", submodule_search_locations=[root]
)
sys.modules["fastar_nodes"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    module.FastHybridSetings
except AttributeError as problem:
    print(problem)
print("torch" in sys.modules)
"""


def test_a_misspelt_name_is_answered_before_anything_is_imported(tmp_path):
    command = [sys.executable, "-B", "-c", MISSPELT, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    said = "module 'fastar_nodes' has no attribute 'FastHybridSetings'. Did you mean: 'FastHybridSettings'?"
    assert done.stdout.splitlines() == [said, "False"], done.stderr


def test_the_closest_word():
    assert did_you_mean("Threshhold", ["cfg", "threshold"]) == "did you mean threshold?"
    assert did_you_mean("window", ["cfg", "threshold"]) == ""


def test_an_unknown_name_is_answered_with_the_closest_and_all():
    names = ["cfg", "threshold"]
    assert str(unknown("preset", "there is no preset 'x'", "x", names)) == (
        "preset: there is no preset 'x'; choose one of cfg, threshold."
    )
    assert str(unknown("set", "no such setting", "threshhold", iter(names))) == (
        "set: no such setting; did you mean threshold? Choose one of cfg, threshold."
    )


def test_a_call_of_the_pipeline_takes_what_sample_takes():
    """Editors complete the arguments of both, and what each returns; a call passes all of them on."""
    call = inspect.signature(fastar_nodes.Pipeline.__call__)
    sample = inspect.signature(fastar_nodes.Pipeline.sample)
    assert [*call.parameters.values()] == [*sample.parameters.values()]
    assert {"sampler", "preset", "seed", "mask", "callback"} < set(call.parameters)
    assert call.return_annotation == "tuple[list[Image.Image], Report]"
    assert sample.return_annotation == "Sampled"

    passed = {}

    class Recorder(fastar_nodes.Pipeline):
        def __init__(self):
            pass

        def sample(self, prompt, **arguments):
            passed.update(prompt=prompt, **arguments)
            raise KeyboardInterrupt

    given = {name: object() for name in call.parameters if name not in ("self", "settings")}
    given |= {"image": None, "mask": None}  # which a call reads itself
    with pytest.raises(KeyboardInterrupt):
        Recorder()(**given, cfg=2.0)
    assert passed == {**given, "cfg": 2.0}


def test_files_are_resolved_without_a_folder(tmp_path):
    checkpoints = ROOT / "demo" / "checkpoints"
    assert fastar_nodes.resolve("demo", "mar") == checkpoints / "mar.safetensors"
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(b"x")
    assert fastar_nodes.resolve(str(mine), "mar") == mine
    (tmp_path / "models").mkdir()
    other = tmp_path / "models" / "other.safetensors"
    other.write_bytes(b"x" * 100)
    assert fastar_nodes.resolve("other.safetensors", "mar", tmp_path / "models") == other
    assert fastar_nodes.resolve("other.safetensors", "mar", [tmp_path, tmp_path / "models"], tmp_path) == other
    assert fastar_nodes.resolve("demo", "mar", [], tmp_path) == checkpoints / "mar.safetensors"
    with pytest.raises(UserError, match="^family: 'mra' is unknown; choose one of mar, llamagen, "):
        fastar_nodes.resolve("demo", "mra")
