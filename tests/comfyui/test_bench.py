"""Sweeps, saved reports and the Advisor in a real ComfyUI, over HTTP: interruption, resumption, metadata, memory of the menu."""

from __future__ import annotations

import json
import shutil
import time
import uuid

import numpy as np
from comfy_host import Events, graph, load_workflow, to_api
from PIL import Image

CELLS = 10 * 10


def sweep_graph(**changes):
    """A 10 x 10 sweep of one small picture, its grid saved by 5, its plot by 7 and its table shown by 6."""
    base = graph()
    settings = "ar_steps=4, diffusion_steps=6, guided_steps=3"
    inputs = {"sampler": "fasthybrid", "settings": settings, "x": "threshold", "x_values": "0.1..1 x 10", "y": "lookahead",
              "y_values": "1..10", "seeds": "7", "folder": "ten", "model": ["1", 0], "condition": ["2", 0]}  # fmt: skip
    return {
        "1": base["1"],
        "2": {**base["2"], "inputs": {**base["2"]["inputs"], "labels": "cat"}},
        "3": {"class_type": "FastARSweep", "inputs": {**inputs, **changes}},
        "4": {"class_type": "FastARSweepGrid", "inputs": {"sweep": ["3", 0], "cell_size": 64}},
        "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "sweep"}},
        "6": {"class_type": "PreviewAny", "inputs": {"source": ["3", 1]}},
        "8": {"class_type": "FastARSweepPlot", "inputs": {"sweep": ["3", 0], "measure": "PSNR"}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "plot"}},
    }


def test_a_sweep_of_100_cells_is_interrupted_resumed_and_opened_again(comfy, artifacts):
    folder = comfy.base / "output" / "fastar_sweeps" / "ten"
    prompt = comfy.queue(sweep_graph())
    end = time.monotonic() + 240
    while len(list(folder.glob("*.png"))) < 30 and time.monotonic() < end:
        time.sleep(0.05)
    comfy.post("/interrupt", {})
    assert comfy.failure(comfy.wait(prompt)) == "interrupted"
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")}
    assert 30 <= len(kept) < CELLS and not list(folder.glob(".*")), "no half-written cell"

    outputs = comfy.run(sweep_graph())
    after = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")}
    assert len(after) == CELLS + 1, "with one baseline"
    assert all(after[name] == written for name, written in kept.items()), "a finished cell was drawn again"
    table = outputs["6"]["text"][0]
    assert len(table.splitlines()) == 2 + CELLS and "PSNR" in table.splitlines()[0]
    grid, plot = (comfy.picture(outputs[key]["images"][0]) for key in ("5", "7"))
    assert np.asarray(grid).std() > 20 and plot.size == (960, 640)
    grid.save(artifacts / "sweep_grid.png")
    plot.save(artifacts / "sweep_plot.png")

    # The saved grid holds the prompt. What it opens is the same sweep, of which every cell is there.
    saved = comfy.base / "output" / outputs["5"]["images"][0]["filename"]
    again = json.loads(Image.open(saved).text["prompt"])
    assert again["3"]["inputs"] == sweep_graph()["3"]["inputs"]
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    time.sleep(1.5)
    comfy.run(again)
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.png")} == after


def test_reports_are_in_saved_pictures_and_come_back(comfy):
    save = {"class_type": "SaveImage", "images": ["6", 0], "filename_prefix": "told"}
    prompt = graph(n9=save, n3={"seed": 4242}, n4={"seed": 4242})
    body = {"prompt": prompt, "client_id": uuid.uuid4().hex, "extra_data": {"extra_pnginfo": {"workflow": {}}}}
    entry = comfy.wait(comfy.post("/prompt", body)["prompt_id"])
    grid = comfy.base / "output" / entry["outputs"]["8"]["images"][0]["filename"]
    runs = json.loads(Image.open(grid).text["fastar"])["runs"]
    assert [(r["node"], r["label"], r["sampler"]) for r in runs] == [
        ("7", "MAR", "mar"),
        ("7", "FastHybrid", "fasthybrid"),
    ]
    assert runs[1]["speedup"] > 0 and runs[1]["quality"]["psnr"] > 5

    shutil.copy(grid, comfy.base / "input" / "told.png")
    read = {"class_type": "FastARLoadReport", "inputs": {"image": "told.png"}}
    show = {"1": read, "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 2]}}}
    show["3"] = {"class_type": "PreviewAny", "inputs": {"source": ["1", 3]}}
    outputs = comfy.run(show)
    table = outputs["2"]["text"][0]
    assert "| MAR" in table and "| FastHybrid" in table
    assert any(text.startswith("fasthybrid: ar_steps=8, ") for text in outputs["3"]["text"])
    assert "there is no picture" in comfy.complaint(
        {"1": {**read, "inputs": {"image": "../secret.png"}}, "2": show["2"]}
    )


def test_a_sampler_shows_a_line_on_its_node(comfy):
    client = uuid.uuid4().hex
    with Events(comfy, client) as events:
        prompt = comfy.queue(graph(n3={"seed": 4343}, n4={"seed": 4343}, n7={"report_1": None}), client)
        shown = {}
        for kind, data in events:
            assert kind != "execution_error", data
            if kind == "text":
                shown[data[0]] = data[1]
            if kind == "execution_success" and data["prompt_id"] == prompt:
                break
    assert "passes" in shown["3"] and "4" not in shown, "FastHybrid's report goes to Compare, which shows it"


def small(name, info, **changes):
    prompt = to_api(load_workflow(name), info)
    for node in prompt.values():
        node["inputs"].update(changes.get(node["class_type"], {}))
        if node["class_type"] == "ImageCompare":
            node["inputs"]["compare_view"] = {}
    return prompt


def test_the_shared_sweep_runs(comfy, info):
    few = {"settings": "ar_steps=4, diffusion_steps=6, threshold=0.8", "x_values": "0, 2", "folder": "shared"}
    outputs = comfy.run(small("20 Sweep FastHybrid", info, FastARSweep=few))
    texts = [value["text"][0] for value in outputs.values() if "text" in value]
    pictures = [comfy.picture(value["images"][0]) for value in outputs.values() if "images" in value]
    assert len(texts) == 1 and len(texts[0].splitlines()) == 2 + 4
    assert len(pictures) == 2 and all(np.asarray(p).std() > 5 for p in pictures)


def test_the_shared_advisor_answers(comfy, info):
    few = {
        "FastARAdvisor": {"repeats": 1, "measure": "PSNR", "least": 0.0},
        "FastARClassLabel": {"images_per_label": 1},
    }
    prompt = small("21 Advisor and slider", info, **few)
    outputs = comfy.run(prompt)
    by_type = {
        prompt[key]["class_type"]: value for key, value in outputs.items() if prompt[key]["class_type"] != "PreviewAny"
    }
    assert len(by_type["ImageCompare"]["a_images"]) == len(by_type["ImageCompare"]["b_images"]) == 1
    texts = [value["text"][0] for value in outputs.values() if "text" in value]
    answer = next(text for text in texts if "within the limit" in text)
    table = next(text for text in texts if text is not answer)
    assert answer.startswith("Fastest with PSNR of at least 0: ") and "1.00x" in table
    assert np.asarray(comfy.picture(by_type["SaveImage"]["images"][0])).std() > 20
