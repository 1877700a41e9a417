"""A sweep of the command line in a real ComfyUI: its pictures and its curve."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "scale"))
import made_sweeps
from fastar_nodes.scale.measures import Means, evaluate


def test_a_folder_is_shown_plotted_and_read_again(comfy, artifacts):
    folder = comfy.base / "output" / "big" / "run1"
    store = made_sweeps.write(folder, finished=16, side=64)
    evaluate(store, ["psnr"], Means(resamples=20))
    cell = {"folder": "big/run1", "cell": "cspd", "first": 14, "count": 8}
    prompt = {
        "1": {"class_type": "FastARLoadSweepCell", "inputs": cell},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "cell"}},
        "3": {"class_type": "PreviewAny", "inputs": {"source": ["1", 1]}},
        "4": {"class_type": "FastARSweepPlot", "inputs": {"measure": "PSNR", "folder": "big/run1"}},
        "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "curve"}},
    }
    outputs = comfy.run(prompt)
    assert len(outputs["2"]["images"]) == 2 and "16 of 48 images" in outputs["3"]["text"][0]
    shown = np.asarray(comfy.picture(outputs["2"]["images"][0]))
    assert np.array_equal(shown, store.pictures(store.cell("cspd-0"), store.shards(store.cell("cspd-0"))[1])[6])
    plot = comfy.picture(outputs["5"]["images"][0])
    assert plot.size == (1100, 680)
    plot.save(artifacts / "sweep_folder.png")

    made_sweeps.write(folder, side=64)  # the sweep goes on
    assert len(comfy.run(prompt)["2"]["images"]) == 8, "the same prompt reads the folder again"

    refused = comfy.failure(
        comfy.wait(comfy.queue(prompt | {"1": {**prompt["1"], "inputs": {**cell, "folder": "../run1"}}}))
    )
    assert "folder: there is no folder" in str(refused)
