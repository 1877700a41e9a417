"""The pack in a running ComfyUI, before any prompt."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from comfy_host import PACK, ROOT, WORKFLOWS, load_workflow

NODES = {
    "FastARLoadMAR": ("Load MAR", "load", ["FASTAR_MAR", "VAE"]),
    "FastARLoadLlamaGen": ("Load LlamaGen / PAR", "load", ["FASTAR_TOKEN_MODEL", "VAE"]),
    "FastARLoadTar": ("Load Tar", "load", ["FASTAR_TAR"]),
    "FastARLoadTarDetokenizer": ("Load Tar De-tokenizer", "load", ["FASTAR_TOKEN_MODEL", "VAE"]),
    "FastARTarPrompt": ("Tar Prompt", "condition", ["FASTAR_CODES"]),
    "FastARImageToCodes": ("Image to Codes", "condition", ["FASTAR_CODES"]),
    "FastARTextPrompt": ("Text Prompt (LlamaGen)", "condition", ["FASTAR_TEXT"]),
    "FastARLoadHybrid": ("Load Harmon / UniPic", "load", ["FASTAR_MAR", "VAE"]),
    "FastARPrompt": ("Prompt", "condition", ["FASTAR_PROMPT"]),
    "FastARClassLabel": ("Class Label", "condition", ["FASTAR_LABEL"]),
    "FastARMARSampler": ("MAR Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARFastHybrid": ("FastHybrid Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARLazyMAR": ("LazyMAR Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARLazyMARCache": ("LazyMAR Cache", "sample", ["FASTAR_CACHE"]),
    "FastARCSpD": ("CSpD Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARLlamaGenSampler": ("LlamaGen Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARPAR": ("PAR Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARZipAR": ("ZipAR Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARMuLoSD": ("MuLo-SD Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARFastHybridSampler": ("FastHybrid Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARLazyMARSampler": ("LazyMAR Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARLazyMARFeatureCache": ("LazyMAR Cache", "sample", ["FASTAR_CACHE"]),
    "FastARCSpDSampler": ("CSpD Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARZipARSampler": ("ZipAR Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARMuLoSDSampler": ("MuLo-SD Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARCompare": ("Compare", "compare", ["IMAGE", "STRING"]),
    "FastARTokenMap": ("Token Map", "compare", ["IMAGE"]),
    "FastARReport": ("Report", "compare", ["STRING"]),
    "FastARSweep": ("Sweep", "compare", ["FASTAR_SWEEP", "STRING"]),
    "FastARSweepGrid": ("Sweep Grid", "compare", ["IMAGE"]),
    "FastARSweepPlot": ("Sweep Plot", "compare", ["IMAGE"]),
    "FastARLoadSweepCell": ("Load Sweep Cell", "compare", ["IMAGE", "STRING"]),
    "FastARLoadReport": ("Load Report", "compare", ["IMAGE", "FASTAR_REPORT", "STRING", "STRING"]),
    "FastARAnySampler": ("Any Sampler", "sample", ["LATENT", "FASTAR_REPORT"]),
    "FastARAdvisor": ("Advisor", "compare", ["STRING", "STRING"]),
}


def test_the_pack_is_imported(comfy):
    assert "IMPORT FAILED" not in comfy.log and "Cannot import" not in comfy.log
    assert f"custom_nodes/{PACK}" in comfy.log.replace("\\", "/"), "the log does not list the pack among the imports"


def test_exactly_our_nodes_are_there(info):
    there = {name for name in info if name.startswith("FastAR")}
    assert there == set(NODES), "NODES in this file lists every node"


@pytest.mark.parametrize("node", NODES)
def test_names_sockets_and_tooltips(info, node):
    title, category, outputs = NODES[node]
    about = info[node]
    assert (about["display_name"], about["category"], about["output"]) == (title, f"FastAR/{category}", outputs)
    assert about["description"].endswith((".", ")"))
    inputs = [item for group in ("required", "optional") for item in about["input"].get(group, {}).items()]
    assert inputs
    for name, (_, options) in inputs:
        assert len(options.get("tooltip", "")) > 15, f"{node}.{name} has no tooltip"
    assert all(about["output_tooltips"])
    # What the editor's search finds a node by; deprecated ones are not on offer.
    assert about["deprecated"] or len(about["search_aliases"]) >= 3


@pytest.mark.parametrize("node", NODES)
def test_help_pages_are_served_and_name_every_widget(comfy, info, node):
    page = comfy.bytes(f"/extensions/{PACK}/docs/{node}.md").decode()
    for group in (part for kind, part in info[node]["input"].items() if kind != "hidden"):
        for name in group:
            name = re.sub(r"_[1-8]$", "", name) if node == "FastARCompare" else name
            assert f"**{name}" in page, f"{node}: the help page does not explain {name}"


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_translated_help_pages_and_their_pictures_are_served(comfy, info, language):
    """Where the editor looks for them: docs/<node>/<language>.md, pictures relative to docs."""
    for node in (node for node in NODES if not info[node]["deprecated"]):
        page = comfy.bytes(f"/extensions/{PACK}/docs/{node}/{language}.md").decode()
        assert page.startswith("# ") and not page.startswith("# <")
        for picture in re.findall(r"\]\((images/[^)]+)\)", page):
            assert comfy.bytes(f"/extensions/{PACK}/docs/{picture}").startswith(b"\xff\xd8")


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
