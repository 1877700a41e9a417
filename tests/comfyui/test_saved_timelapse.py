"""Time-lapse in a real ComfyUI: the file that core's helper writes."""

import io
import json
import urllib.parse

from comfy_host import load_workflow, to_api
from fastar_nodes.reports.timelapse import FPS
from PIL import Image


def test_the_file_is_animated_and_holds_the_graph(comfy, info):
    prompt = to_api(load_workflow("03 Race"), info)
    for node in prompt.values():
        node["inputs"].update({"duration": 1.0} if node["class_type"] == "FastARTimeLapse" else {})
    (number,) = (key for key, node in prompt.items() if node["class_type"] == "FastARTimeLapse")
    output = comfy.run(prompt)[number]
    (file,) = output["images"]
    assert output["animated"] == [True] and (file["subfolder"], file["type"]) == ("FastAR", "output")
    with Image.open(io.BytesIO(comfy.bytes(f"/view?{urllib.parse.urlencode(file)}"))) as image:
        milliseconds = 0
        for k in range(image.n_frames):  # the last one stands for all that are equal to it
            image.seek(k)
            image.load()
            milliseconds += image.info["duration"]
        held = [str(text) for text in image.getexif().values()]
    assert image.format == "WEBP" and milliseconds == (3 * FPS + 1) * (1000 // FPS)
    kept = next(text.removeprefix("prompt:") for text in held if text.startswith("prompt:"))
    assert json.loads(kept)[number]["class_type"] == "FastARTimeLapse"
