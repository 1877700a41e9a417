"""The pack in a running ComfyUI, before any prompt."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from comfy_host import PACK, ROOT, WORKFLOWS, load_workflow

NODES = json.loads((ROOT / "tests" / "nodes" / "schemas.json").read_text(encoding="utf-8"))


def test_the_pack_is_imported(comfy):
    assert "IMPORT FAILED" not in comfy.log and "Cannot import" not in comfy.log
    assert f"custom_nodes/{PACK}" in comfy.log.replace("\\", "/"), "the log does not list the pack among the imports"


def test_exactly_our_nodes_are_there(info):
    there = {name for name in info if name.startswith("FastAR")}
    assert there == set(NODES)


@pytest.mark.parametrize("node", NODES)
def test_names_sockets_and_tooltips(info, node):
    about = info[node]
    outputs = [kind for _, kind in NODES[node]["outputs"]]
    assert (about["display_name"], about["output"]) == (NODES[node]["name"], outputs)
    assert about["category"] in {f"FastAR/{name}" for name in ("load", "condition", "sample", "compare")}
    assert about["description"].endswith((".", ")"))
    inputs = [item for group in ("required", "optional") for item in about["input"].get(group, {}).items()]
    assert inputs
    for name, (_, options) in inputs:
        assert len(options.get("tooltip", "")) > 15, f"{node}.{name} has no tooltip"
    assert all(about["output_tooltips"])
    assert len(about["search_aliases"]) >= 3


@pytest.mark.parametrize("node", NODES)
def test_help_pages_are_served_and_name_every_widget(comfy, info, node):
    page = comfy.bytes(f"/extensions/{PACK}/docs/{node}.md").decode()
    for group in (part for kind, part in info[node]["input"].items() if kind != "hidden"):
        for name in group:
            name = re.sub(r"_[1-8]$", "", name) if node == "FastARCompare" else name
            assert f"**{name}" in page, f"{node}: the help page does not explain {name}"


@pytest.mark.parametrize("node", ["FastARMARSampler", "FastARZipARSampler"])
def test_seed_is_controlled_like_ksamplers(info, node):
    seed = info[node]["input"]["required"]["seed"][1]
    core = info["KSampler"]["input"]["required"]["seed"][1]
    assert {k: seed[k] for k in ("min", "max", "control_after_generate")} == {
        k: core[k] for k in ("min", "max", "control_after_generate")
    }


def test_the_text_encoder_that_fits_is_chosen(info):
    """Whatever other encoders lie in the folder."""
    assert info["FastARTextPrompt"]["input"]["required"]["encoder"][1]["default"].startswith("flan-t5-xl")


def test_the_template_browser_gets_workflows_and_thumbnails(comfy):
    assert sorted(comfy.get("/workflow_templates")[PACK]) == WORKFLOWS
    for name in WORKFLOWS:
        address = f"/api/workflow_templates/{PACK}/{quote(name)}"
        assert comfy.get(f"{address}.json") == load_workflow(name)
        thumbnail = comfy.bytes(f"{address}.jpg")
        assert thumbnail == (ROOT / "workflows" / f"{name}.jpg").read_bytes()
        assert thumbnail[:2] == b"\xff\xd8"


def test_blueprints_are_listed_and_readable(comfy):
    found = {entry["name"]: key for key, entry in comfy.get("/global_subgraphs").items() if PACK in str(entry["info"])}
    files = {path.stem: path for path in (ROOT / "subgraphs").glob("*.json")}
    assert found.keys() == files.keys() and files
    for name, key in found.items():
        assert json.loads(comfy.get(f"/global_subgraphs/{key}")["data"]) == json.loads(files[name].read_text("utf-8"))
