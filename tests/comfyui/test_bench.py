"""Sweeps, saved reports and the Advisor in a real ComfyUI, over
HTTP: interruption, resumption, metadata, memory of the menu.
"""

import json
import re
import time
import uuid

import numpy as np
from comfy_host import EDITOR, defaults, graph, sweep_workflow, to_api
from PIL import Image

CELLS = 10 * 10


def test_a_sweep_of_100_cells_is_interrupted_resumed_and_opened_again(comfy, info, artifacts):
    folder = comfy.base / "output" / "fastar_sweeps" / "ten"
    asked = to_api(sweep_workflow("ten"), info)
    (sweep,) = [key for key, node in asked.items() if node["class_type"] == "FastARSweep"]
    asked["table"] = {"class_type": "PreviewAny", "inputs": {"source": [sweep, 1]}}
    prompt = comfy.queue(asked)
    end = time.monotonic() + 240
    while len(list(folder.glob("*.png"))) < 30 and time.monotonic() < end:
        time.sleep(0.05)
    comfy.post("/interrupt", {})
    assert comfy.failure(comfy.wait(prompt)) == "interrupted"
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")}
    assert 30 <= len(kept) < CELLS and not list(folder.glob(".*")), "no half-written cell"

    outputs = comfy.run(asked)
    after = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")}
    assert len(after) == CELLS + 1, "with one baseline"
    assert all(after[name] == written for name, written in kept.items()), "a finished cell was drawn again"
    (table,) = [value["text"][0] for value in outputs.values() if "text" in value]
    assert len(table.splitlines()) == 2 + CELLS and "PSNR" in table.splitlines()[0]
    (shown,) = outputs[sweep]["images"]
    assert np.asarray(comfy.picture(shown)).std() > 5

    # The image on the node holds the prompt. What it opens is the same sweep, of which every cell is there.
    again = json.loads(Image.open(comfy.base / "temp" / shown["subfolder"] / shown["filename"]).text["prompt"])
    assert again == asked
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    comfy.run(again)
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")} == after


def test_a_prompt_with_the_nodes_of_earlier_versions_runs(comfy, info):
    """As a program sends it that was written for Sweep Grid and Sweep Plot."""
    plan = {"settings": "steps=4, diffusion_steps=6", "x_values": "0.5, 0.9", "folder": "earlier"}
    sweep = defaults(info["FastARSweep"], model=["1", 0], condition=["2", 0], **plan)
    del sweep["cell_size"], sweep["measure"]
    prompt = {
        "1": {"class_type": "FastARLoadMAR", "inputs": defaults(info["FastARLoadMAR"])},
        "2": {"class_type": "FastARClassLabel", "inputs": defaults(info["FastARClassLabel"], labels="cat")},
        "3": {"class_type": "FastARSweep", "inputs": sweep},
        "4": {"class_type": "FastARSweepGrid", "inputs": {"sweep": ["3", 0], "cell_size": 64}},
        "5": {"class_type": "FastARSweepPlot", "inputs": {"sweep": ["3", 0], "measure": "passes"}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "grid"}},
        "7": {"class_type": "PreviewImage", "inputs": {"images": ["5", 0]}},
    }
    outputs = comfy.run(prompt)
    shown = comfy.picture(*outputs["3"]["images"])
    grid, plot = (comfy.picture(*outputs[key]["images"]) for key in ("6", "7"))
    assert grid.width == 480 and grid == shown.crop((0, 0, *grid.size))
    assert plot.size == (720, 400) and plot == shown.crop((480, 0, 1200, 400))


def test_nodes_say_their_figures_to_the_editor(comfy):
    client = uuid.uuid4().hex
    with comfy.events(client) as events:
        prompt = comfy.queue(graph(n3={"seed": 4343}, n4={"seed": 4343}), client, EDITOR)
        said = {}
        for kind, data in events:
            assert kind != "execution_error", data
            if kind == "executed" and "fastar_text" in (data["output"] or {}):
                (said[data["node"]],) = data["output"]["fastar_text"]
            if kind == "execution_success" and data["prompt_id"] == prompt:
                break
    assert said.keys() == {"3", "4", "7"}, "both samplers and Compare"
    for sampler in ("3", "4"):
        figures, settings = said[sampler].split("\n")[-2:]
        assert " passes" in figures and "8 AR steps" in settings
    # Two images, each at its own pace.
    assert re.match(r"FastHybrid: ([89]|1\d) passes, ", said["7"]) and "PSNR" in said["7"]
