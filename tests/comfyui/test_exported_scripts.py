"""Templates exported as Python scripts, in a process with ComfyUI's modules and without its server."""

import json
import subprocess

import pytest
from comfy_host import PACK, ROOT, TEMPLATES, find_core, find_python, load_workflow, to_api
from test_running import FEW

# The others need weights.
WITHOUT_DOWNLOAD = [name for name in TEMPLATES if "download" not in name]


def short(name, info):
    """The prompt of a template, to be run in seconds, with an image where it has none."""
    prompt = to_api(load_workflow(name), info)
    for node in prompt.values():
        inputs = node["inputs"]
        inputs.update({setting: 4 for setting in ("steps", "diffusion_steps") if setting in inputs})
        inputs.update(
            {setting: 1 for setting in ("images_per_label", "images") if isinstance(inputs.get(setting), int)}
        )
        inputs.update(FEW.get(node["class_type"], {}))
        if node["class_type"] == "FastARClassLabel":
            inputs["labels"] = "cat"
        if node["class_type"] == "LoadImage":
            inputs["image"] = "example.png"
    return prompt


@pytest.fixture(scope="module")
def told(comfy, info, tmp_path_factory):
    """What the scripts of the templates ended with, by name."""
    base = tmp_path_factory.mktemp("scripts")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / PACK).symlink_to(ROOT, target_is_directory=True)
    (base / "input").symlink_to(comfy.base / "input", target_is_directory=True)
    prompts = {name: short(name, info) for name in WITHOUT_DOWNLOAD}
    (base / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")

    core = find_core()
    program = str(ROOT / "tests" / "lib" / "exported_script.py")
    command = [find_python(core), program, str(core), str(base), str(base / "prompts.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    lines = [line.removeprefix("RAN ") for line in done.stdout.splitlines() if line.startswith("RAN ")]
    assert len(lines) == len(prompts), done.stderr[-4000:]
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("name", WITHOUT_DOWNLOAD)
def test_a_template_runs_as_a_script(told, name):
    assert told[name] == "ok"
