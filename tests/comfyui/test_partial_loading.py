"""Networks that a real ComfyUI loads partially."""

import json
import subprocess
from pathlib import Path

import pytest
from comfy_host import ROOT, Missing, find_core, find_python


@pytest.fixture(scope="module")
def found():
    try:
        core = find_core()
        python = find_python(core)
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    script = Path(__file__).with_name("partial_loading.py")
    done = subprocess.run([python, str(script), str(core), str(ROOT)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


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
        assert "GB of weights streamed from main memory" in half["note"]
