"""The pack in a running ComfyUI, before any prompt."""

import json
from urllib.parse import quote

import pytest
from comfy_host import PACK, ROOT, TEMPLATES, load_workflow

NODES = json.loads((ROOT / "tests" / "nodes" / "schemas.json").read_text(encoding="utf-8"))


def test_exactly_our_nodes_are_there(info):
    there = {name for name in info if name.startswith("FastAR")}
    assert there == set(NODES)


@pytest.mark.parametrize("node", NODES)
def test_schemas_and_help_pages_are_served(comfy, info, node):
    """What they hold is tested in tests/nodes/test_schemas.py."""
    about, recorded = info[node], NODES[node]
    assert (about["display_name"], about["output"]) == (recorded["name"], [kind for _, kind in recorded["outputs"]])
    inputs = [*about["input"].get("required", {}), *about["input"].get("optional", {})]
    assert sorted(inputs) == sorted(part[0] for kind in ("widgets", "inputs") for part in recorded[kind])
    assert comfy.bytes(f"/extensions/{PACK}/docs/{node}.md").decode().startswith(f"# {recorded['name']}\n")


def test_the_text_encoder_that_fits_is_chosen(info):
    """Whatever other encoders lie in the folder."""
    assert info["FastARLlamaGenPrompt"]["input"]["optional"]["encoder"][1]["default"].startswith("flan-t5-xl")


def test_the_template_browser_gets_workflows_and_thumbnails(comfy):
    assert sorted(comfy.get("/workflow_templates")[PACK]) == TEMPLATES
    for name in TEMPLATES:
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
