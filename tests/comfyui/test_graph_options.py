"""Two recorders of CUDA graphs in one process: ComfyUI's and this pack's.

ComfyUI 0.33 records the layers of some of its models, and from 0.35 on its compiler also places what they allocate.
Both work within one call of such a model, on the thread of the prompt, and end before the next node runs; recordings
have streams and memory of their own, and an error of one thread. So the two meet in the options, where who turns graphs
off turns off both, and in DynamicVRAM, which may unmap weights of other models while a graph is recorded: the device is
idle before (docs/precision.md).
"""

import subprocess

import pytest
from comfy_host import ROOT, Missing, find_core, find_python

SCRIPT = """
import sys
core, pack, *options = sys.argv[1:]
sys.argv = ["main.py", "--cpu", *options]
sys.path[:0] = [core, pack + "/tests/lib"]
import comfy.options
comfy.options.enable_args_parsing()
import importlib, importlib.util
spec = importlib.util.spec_from_file_location("fastar", pack + "/__init__.py", submodule_search_locations=[pack])
sys.modules["fastar"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["fastar"])
importlib.import_module("fastar.nodes.host.operations")
print("allowed", importlib.import_module("fastar.networks.graphs").allowed)
"""
OFF = ("--disable-cuda-graphs", "--disable-comfy-compiler")


@pytest.fixture(scope="module")
def core():
    try:
        found = find_core()
        find_python(found)
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    return found


@pytest.mark.parametrize("option", ["", *OFF])
def test_who_turns_graphs_off_turns_off_both(core, option):
    if option and f'"{option}"' not in (core / "comfy" / "cli_args.py").read_text(encoding="utf-8"):
        pytest.skip(f"NOT TESTED IN COMFYUI: this version has no {option}")

    command = [find_python(core), "-c", SCRIPT, str(core), str(ROOT), *([option] if option else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"allowed {not option}"


def test_comfyui_ends_its_recordings_between_nodes(core):
    """What it allocates in the call of a model is its compiler's until then."""
    prefetch = core / "comfy" / "model_prefetch.py"
    if not prefetch.exists():
        pytest.skip("NOT TESTED IN COMFYUI: this version records nothing")

    assert "model_prefetch.cleanup_prefetch_queues()" in (core / "execution.py").read_text(encoding="utf-8")
    text = prefetch.read_text(encoding="utf-8")
    assert 'capture_error_mode="thread_local"' in text
    is_idle = "with torch.cuda.graph(" in text  # waits for the device as it begins
    assert is_idle, "what makes it safe that DynamicVRAM frees memory while a graph is recorded"
    if "MALLOC_GRAPHS" in text:
        assert "MALLOC_GRAPHS.get(threading.get_ident())" in text, "the compiler places what its own thread allocates"
