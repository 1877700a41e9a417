"""Sweeps, saved reports and the Advisor in a real ComfyUI, over
HTTP: interruption, resumption, metadata, memory of the menu.
"""

import json
import time
import uuid

import numpy as np
from comfy_host import EDITOR, graph, sweep_workflow, to_api
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
    (saved,) = [
        value["images"][0] for value in outputs.values() if value.get("images", [{}])[0].get("type") == "output"
    ]
    pictures = [comfy.picture(value["images"][0]) for value in outputs.values() if "images" in value]
    assert len(pictures) == 2 and all(np.asarray(picture).std() > 5 for picture in pictures)

    # The saved grid holds the prompt. What it opens is the same sweep, of which every cell is there.
    again = json.loads(Image.open(comfy.base / "output" / saved["subfolder"] / saved["filename"]).text["prompt"])
    assert again == asked
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    comfy.run(again)
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")} == after


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
    assert "FastHybrid: 8 passes" in said["7"] and "PSNR" in said["7"]
