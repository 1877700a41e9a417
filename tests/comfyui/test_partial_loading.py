"""Networks that a real ComfyUI loads partially."""

import json
import subprocess

import pytest
from comfy_host import ROOT, Missing, find_core, find_python


def run_in_core(script: str):
    """What a script of tests/lib prints in ComfyUI."""
    try:
        core = find_core()
        python = find_python(core)
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    command = [python, str(ROOT / "tests" / "lib" / script), str(core), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_core_has_what_we_need_of_its_operations_and_memory_management():
    """The attributes of core and torch that nodes/host/ relies
    on. If this fails, read the release notes of core first.
    """
    needs = run_in_core("partial_loading_needs.py")
    assert [need for need, there in needs.items() if not there] == []


@pytest.fixture(scope="module")
def found():
    return run_in_core("partial_loading.py")


@pytest.mark.parametrize("model", ["words", "harmon", "llamagen"])
def test_a_partially_loaded_network_gives_the_same_result(found, model):
    whole, half, none, again, unloaded = found[model]
    assert all(run["equal"] for run in found[model]) and unloaded["taken"] > 1 << 19
    for run in (whole, again):
        assert run["offloaded"] == run["casts"] == 0 and not run["note"]
    assert 0 < half["offloaded"] < none["offloaded"] == none["may"]
    assert 0.1 * half["bytes"] < half["loaded"] < 0.6 * half["bytes"]
    assert 0 < half["casts"] < none["casts"]
    if model != "words":
        assert "GB of weights are in system memory" in half["note"]


@pytest.fixture(scope="module")
def dynamic():
    return run_in_core("dynamic_patcher.py")


def test_core_knows_all_parts_of_a_model_and_keeps_its_cached_result(dynamic):
    """Language model, MAR, head and decoder of the demo's hybrid: core tracks all but the head, which is loaded before
    the run as compiled networks are.
    """
    expected = {"dynamic": [True, True, False, True], "tracked": 3, "kept": True, "kept, compiled": False}
    assert dynamic["in use"] == expected


@pytest.mark.parametrize("model", ["llamagen", "llamagen in fp8", "tar", "tar in fp8", "mar", "kl"])
def test_a_network_under_the_patcher_of_dynamic_vram_gives_the_same_result(dynamic, model):
    run = dynamic[model]
    assert run["equal"] and run["dynamic"]
    assert run["cast"] == run["layers"] > 0, "DynamicVRAM casts every layer of core's operations"
    assert not run["compiled"], "a compiled network has its weights in place"
