"""Weights of 4 bits in a real ComfyUI: files in its own format, and what its operations make of dtype int4."""

import json
import subprocess

import pytest
from comfy_host import ROOT, Missing, find_core, find_python


@pytest.fixture(scope="module")
def found():
    try:
        core = find_core()
        python = find_python(core)
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    if "asym_w4a8_int8" not in (core / "comfy" / "quant_ops.py").read_text(encoding="utf-8"):
        pytest.skip("NOT TESTED IN COMFYUI: this version has no format of 4 bits")

    command = [python, str(ROOT / "tests" / "lib" / "four_bits_in_core.py"), str(core), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_file_in_comfyuis_4_bits_is_its_own_product(found):
    read = found["file"]
    assert (
        read["names"] == ["layers.0.feed_forward.w1.weight"] and read["kind"] == "int4" and read["shape"] == [64, 256]
    )
    assert read["equal product"] and 0.02 < read["numbers"] < 0.1 and 0.02 < read["product"] < 0.1


def test_what_does_not_fit_is_in_comfyuis_formats(found):
    """Of 4 bits where it rotates 256 columns, else of 8; planes are its int8."""
    streamed = found["streamed"]
    assert streamed["formats"] == [["int4", 0], ["int8", 0]] and streamed["planes"] == ["int8", 0]
    assert streamed["fits"] == ["int4", 32]
    assert streamed["kind"] == "int4" and streamed["product"] < 0.1 and 4 < streamed["bits"] < 5


def test_what_fits_is_in_this_packs_layers(found):
    network = found["network"]
    assert network["layers"] == ["PackedLinear"] * 3 and network["equal product"]
    assert network["core's"] == "comfy.ops"
    assert 0.9 * network["bytes"][0] < network["bytes"][1] <= network["bytes"][0]


def test_convrot_w4a4_is_refused(found):
    assert found["refused"].startswith("holds weights in convrot_w4a4, which FastAR does not read, because")
