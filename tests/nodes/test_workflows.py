"""Every shared graph and blueprint: known nodes, values for every widget, links that lead somewhere, a layout that can be read, a run.

``tests/workflows/VERSION`` holds the graphs of every release, which are opened and run as well; there was none so far.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from pathlib import Path

import pytest
import torch
from fake_comfy import Preview
from fastar_nodes.model_loaders import hub
from fastar_nodes.nodes import host
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.tools.training import recipes, token_recipes
from graphs import WIDGETS, Run, widget_values
from test_schemas import CLASSES, NODES

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
GRAPHS = sorted(path.name for path in FOLDER.glob("*.json"))
# In core since 0.27 (Seed) or before, or drawn by the editor alone.
CORE = {
    *("SeedNode", "VAEDecode", "VAEEncode", "SaveImage", "PreviewImage", "PreviewAny", "PrimitiveInt", "LoadImage"),
    *("MarkdownNote", "SolidMask", "MaskComposite", "EmptyImage", "ImageCompositeMasked", "ImageCompare"),
    "PrimitiveStringMultiline",
}
# Nodes that run samplers by name, with the settings of the model's file.
BY_NAME = {"FastARSweep", "FastARAnySampler"}
# What has to be equal for two runs to be compared: steps and guidance of a MAR; guidance, temperature and top-k of tokens.
SAMPLERS = {
    "MAR": ("FastARMARSampler", "FastARFastHybridSampler", "FastARLazyMARSampler", "FastARCSpDSampler"),
    "tokens": ("FastARLlamaGenSampler", "FastARPAR", "FastARZipARSampler", "FastARMuLoSDSampler"),
}
SHARED = {"MAR": ("ar_steps", "diffusion_steps", "cfg"), "tokens": ("cfg", "temperature", "top_k")}
AUTO = -1
LOADERS = {
    "FastARLoadMAR": "mar",
    "FastARLoadLlamaGen": "llamagen",
    "FastARLoadTar": "tar",
    "FastARLoadTarDetokenizer": "dtok",
    "FastARLoadHybrid": "hybrid",
}
PROMPT = "FastARTarPrompt"
MULOSD = ("FastARMuLoSDSampler",)


@pytest.fixture(params=GRAPHS)
def graph(request):
    return json.loads((FOLDER / request.param).read_text(encoding="utf-8"))


def test_every_graph_has_a_thumbnail():
    assert GRAPHS
    for name in GRAPHS:
        picture = (FOLDER / name).with_suffix(".jpg").read_bytes()
        assert picture[:2] == b"\xff\xd8" and len(picture) < 200_000


def test_nodes_are_known(graph):
    assert {node["type"] for node in graph["nodes"]} <= CORE | set(NODES)
    assert len({node["id"] for node in graph["nodes"]}) == len(graph["nodes"])
    assert graph["last_node_id"] == max(node["id"] for node in graph["nodes"])


def test_widgets_have_values_in_range(graph):
    for node in graph["nodes"]:
        if node["type"] not in NODES:
            continue
        values = widget_values(node, NODES[node["type"]])
        widgets = [i for i in NODES[node["type"]].inputs if i.kind in WIDGETS]
        controls = sum(bool(i.about.get("control_after_generate")) for i in widgets)
        missing = len(widgets) + controls - len(node["widgets_values"])
        assert missing == 0, f"{node['type']}: a value for every widget"
        for about in widgets:
            value = values[about.id]
            if about.kind == "COMBO":
                assert value in about.about["options"], (node["type"], about.id)
            if about.kind in ("INT", "FLOAT"):
                assert about.about["min"] <= value <= about.about["max"], (node["type"], about.id)


def test_links_agree_with_both_ends(graph):
    nodes = {node["id"]: node for node in graph["nodes"]}
    for link, source, out, target, into, kind in graph["links"]:
        assert nodes[target]["inputs"][into]["link"] == link
        assert link in nodes[source]["outputs"][out]["links"]
        assert kind == nodes[source]["outputs"][out]["type"]
    used = [i["link"] for node in graph["nodes"] for i in node["inputs"] if i["link"] is not None]
    assert sorted(used) == sorted(link[0] for link in graph["links"])


def test_sockets_are_the_nodes_own(graph):
    for node in graph["nodes"]:
        if node["type"] in NODES:
            about, given = NODES[node["type"]].inputs, [i["name"] for i in node["inputs"]]
            assert set(given) <= {i.id for i in about}
            sockets = [i.id for i in about if i.kind not in WIDGETS]
            if node["type"] == "FastARCompare":  # the editor shows a free pair behind the last connected one
                pairs = [int(i["name"].rpartition("_")[2]) for i in node["inputs"] if i["link"] is not None]
                sockets = sockets[: 2 * min(8, max(pairs) + 1)]
            assert given[: len(sockets)] == sockets, f"{node['type']}: a graph lists every socket, connected or not"
            assert [o["name"] for o in node["outputs"]] == [o.id for o in NODES[node["type"]].outputs]


def box(node):
    """Left, top, width and height of a node with its title bar; of a collapsed node, of the title bar."""
    height = 0 if node["flags"].get("collapsed") else node["size"][1]
    if node["type"] in LOADERS:  # the classic renderer enlarges a node whose rows do not fit
        rows = len([i for i in NODES[node["type"]].inputs if i.kind in WIDGETS])
        height = max(height, 20 * len(node["outputs"]) + 24 * rows + 14)
    return node["pos"][0], node["pos"][1] - 30, node["size"][0], height + 30


def test_nothing_overlaps(graph):
    boxes = [(n["type"], *box(n)) for n in graph["nodes"]]
    for (a, ax, ay, aw, ah), (b, bx, by, bw, bh) in itertools.combinations(boxes, 2):
        assert not (ax < bx + bw and bx < ax + aw and ay < by + bh and by < ay + ah), (a, b)


def zoom(graph, width=1920, height=1080):
    """Zoom at which the editor opens a graph as a template: the nodes and a margin of 10 take three quarters of the window."""
    boxes = [box(node) for node in graph["nodes"]]
    right, bottom = (max(b[k] + b[k + 2] for b in boxes) for k in (0, 1))
    left, top = (min(b[k] for b in boxes) for k in (0, 1))
    return 0.75 * min(width / (right - left + 20), height / (bottom - top + 20))


def test_a_graph_opens_at_sixty_percent_and_its_groups_are_visible(graph):
    """Below that size the editor draws no text."""
    scale = zoom(graph)
    assert scale >= 0.6
    assert max(g["bounding"][1] + g["bounding"][3] for g in graph["groups"]) * scale <= 1080


# Height by which the live preview and the status line enlarge a sampler in the classic renderer, by family.
PREVIEW = {"MAR": 256, "tokens": 240}


def test_a_live_preview_fits_into_its_group_and_above_the_next_node(graph):
    grown = {kind: PREVIEW[family] for family, kinds in SAMPLERS.items() for kind in kinds}
    for node in (n for n in graph["nodes"] if n["type"] in grown):
        x, y, w, h = box(node)
        h += grown[node["type"]]
        ((_, top, _, height),) = (
            g["bounding"] for g in graph["groups"] if g["bounding"][0] <= x < g["bounding"][0] + g["bounding"][2]
        )
        assert y + h <= top + height, node["type"]
        below = [b for b in map(box, graph["nodes"]) if b[1] > y and b[0] < x + w and x < b[0] + b[2]]
        assert all(y + h <= b[1] for b in below), node["type"]


def test_seeds_are_core_seed_nodes(graph):
    nodes, links = {n["id"]: n for n in graph["nodes"]}, {link[0]: link for link in graph["links"]}
    seeds = [i["link"] for n in graph["nodes"] for i in n["inputs"] if i["name"] == "seed"]
    assert seeds or by_name(graph)
    assert {nodes[links[link][1]]["type"] for link in seeds} <= {"SeedNode"}


def test_groups_hold_whole_nodes_and_do_not_touch(graph):
    boxes = [group["bounding"] for group in graph["groups"]]
    for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes, 2):
        assert not (ax < bx + bw and bx < ax + aw and ay < by + bh and by < ay + ah)
    for node in (n for n in graph["nodes"] if n["type"] != "MarkdownNote"):
        x, y, w, h = box(node)
        inside = [gx <= x and x + w <= gx + gw and gy <= y and y + h <= gy + gh for gx, gy, gw, gh in boxes]
        assert inside.count(True) == 1, node


def test_a_new_graph_needs_no_file_and_no_download(graph):
    loaders = [node for node in graph["nodes"] if node["type"].startswith("FastARLoad")]
    assert loaders
    for node in loaders:
        choice, *others = node["widgets_values"]
        entry = next(entry for entry in hub.entries(LOADERS[node["type"]]) if entry.id == choice)
        assert entry.built_in and not entry.missing, f"{choice} does not come with the package"
        assert set(others) <= {"auto", "plain", False}


def test_a_note_says_what_to_do(graph):
    (note,) = (n for n in graph["nodes"] if n["type"] == "MarkdownNote")
    assert all(word in note["widgets_values"][0] for word in ("Press **Run**", "### Try", "### Official checkpoints"))


def families(graph):
    """Of a graph's samplers, the values that have to be equal, by family."""
    found = {}
    for family, kinds in SAMPLERS.items():
        nodes = [widget_values(n, NODES[n["type"]]) for n in graph["nodes"] if n["type"] in kinds]
        if nodes:
            found[family] = [[values[name] for name in SHARED[family]] for values in nodes]
    return found


def by_name(graph):
    return any(n["type"] in BY_NAME for n in graph["nodes"])


def compares(graph):
    return any(n["type"] == "FastARCompare" for n in graph["nodes"])


def test_samplers_that_are_compared_share_their_settings(graph):
    """Otherwise the speed-up under the pictures would be another thing's."""
    main = families(graph)
    assert main or by_name(graph)
    for values in main.values():
        assert all(value == values[0] for value in values)
        assert len(values) > 1 or not compares(graph) or by_name(graph)


def test_samplers_run_under_what_the_demo_recommends(graph):
    """The same numbers that its files carry, and that the command line takes from there."""
    large = any(n["widgets_values"][0] == "demo-llamagen" for n in graph["nodes"] if n["type"] == "FastARLoadLlamaGen")
    asked = token_recipes.defaults(token_recipes.GRID if large else token_recipes.LOW_GRID)
    tokens = LlamaGenSettings(**{name: asked[name] for name in token_recipes.DEFAULTS})
    record = {
        "MAR": [recipes.DEFAULTS[name] for name in ("ar_steps", "diffusion_steps", "cfg")],
        "tokens": [tokens.cfg, tokens.temperature, tokens.top_k],
    }
    for family, values in families(graph).items():
        assert values[0] in (record[family], [AUTO] * 3)


def test_samplers_share_label_and_seed(graph):
    """One Class Label, or Tar's one prompt, and one seed feed all of them; an edit has one of each for the picture and one for what
    is painted in."""
    nodes, links = {n["id"]: n for n in graph["nodes"]}, {link[0]: link for link in graph["links"]}
    kinds = [kind for kinds in SAMPLERS.values() for kind in kinds]
    samplers = [n for n in graph["nodes"] if n["type"] in kinds]
    samplers += [n for n in graph["nodes"] if n["type"] == "FastARAnySampler"]
    if not compares(graph):
        assert len(samplers) == 1 or by_name(graph)
        return
    edits = any(i["name"] == "mask" and i["link"] is not None for n in samplers for i in n["inputs"])
    for name in ("condition", "seed"):
        sources = [links[i["link"]][1] for n in samplers for i in n["inputs"] if i["name"] == name]
        assert len(sources) == len(samplers)
        prompts = [nodes[source] for source in set(sources) if nodes[source]["type"] == PROMPT]
        if len(prompts) > 1:  # in several details: one text, one seed, one model
            fed = [{i["name"]: links[i["link"]][1] for i in n["inputs"] if i["link"] is not None} for n in prompts]
            assert len(prompts) == len(set(sources)) and all(
                f == fed[0] and {"tar", "text", "seed"} <= set(f) for f in fed
            )
        else:
            assert len(set(sources)) == (2 if edits else 1)


STARTERS = sorted(name for name in GRAPHS if name.endswith(".app.json"))


def test_every_family_has_a_starter():
    assert len(STARTERS) == 4


@pytest.mark.parametrize("name", STARTERS)
def test_starters_are_small_and_readable(name):
    """Five or six nodes and the seed."""
    graph = json.loads((FOLDER / name.replace(".app.", ".")).read_text(encoding="utf-8"))
    assert 5 <= sum(n["type"] not in ("MarkdownNote", "SeedNode") for n in graph["nodes"]) <= 6
    assert zoom(graph) >= 0.8


@pytest.mark.parametrize("name", STARTERS)
def test_an_app_is_its_starter_in_app_mode(name):
    app, graph = (json.loads((FOLDER / n).read_text(encoding="utf-8")) for n in (name, name.replace(".app.", ".")))
    nodes = {node["id"]: node for node in graph["nodes"]}
    shown = graph["extra"]["linearData"]
    assert shown["inputs"] and [nodes[number]["type"] for number in shown["outputs"]] == ["SaveImage"]
    for number, widget in shown["inputs"]:
        kind = nodes[number]["type"]
        assert (
            kind == "SeedNode" and widget == "seed" or widget in {i.id for i in NODES[kind].inputs if i.kind in WIDGETS}
        )
        assert all(i["link"] is None for i in nodes[number]["inputs"] if i["name"] == widget)
    assert app["id"] != graph["id"] and app["extra"].pop("linearMode") is True and "linearMode" not in graph["extra"]
    assert {**app, "id": graph["id"]} == graph


def test_drafts_are_smaller_models_of_the_same_family(graph):
    nodes, links = {n["id"]: n for n in graph["nodes"]}, {link[0]: link for link in graph["links"]}
    for node in (n for n in graph["nodes"] if n["type"] in MULOSD):
        pair = [nodes[links[i["link"]][1]] for name in ("target", "draft") for i in node["inputs"] if i["name"] == name]
        assert len(pair) == 2 and pair[0]["type"] == pair[1]["type"]
        target, draft = (loader["widgets_values"][0] for loader in pair)
        assert hub.draft_for(target) == draft


def test_pictures_are_decoded_with_their_own_models_decoder(graph):
    nodes, links = {n["id"]: n for n in graph["nodes"]}, {link[0]: link for link in graph["links"]}

    def source(node, name):
        return nodes[links[next(i["link"] for i in node["inputs"] if i["name"] == name)][1]]

    for node in graph["nodes"]:
        if node["type"] == "VAEDecode":
            sampler, loader = source(node, "samples"), source(node, "vae")
            drafting = (*MULOSD, "FastARCSpDSampler")
            model = "target" if sampler["type"] in drafting else "model"
            # The demo's KL decoder is the draft's too.
            assert source(sampler, model)["type"] == loader["type"]
            if loader["type"] != "FastARLoadMAR":
                assert source(sampler, model) is loader


def test_every_compared_picture_is_paired_with_its_own_numbers(graph):
    nodes, links = {n["id"]: n for n in graph["nodes"]}, {link[0]: link for link in graph["links"]}
    for node in (n for n in graph["nodes"] if n["type"] in ("FastARCompare", "FastARTokenMap")):
        into = {i["name"]: links[i["link"]][1] for i in node["inputs"] if i["link"] is not None}
        pairs = [(name.replace("report", "image"), by) for name, by in into.items() if name.startswith("report")]
        for name, sampler in pairs:
            picture = nodes[into[name]]
            if picture["type"] == "VAEDecode":
                assert next(links[i["link"]][1] for i in picture["inputs"] if i["name"] == "samples") == sampler
        if node["type"] == "FastARCompare":
            labels, pictures = node["widgets_values"][0], sum(name.startswith("image") for name in into)
            assert not labels or len(labels.split("\n")) == pictures, "a line a picture"


def test_the_files_that_a_note_links_to_are_offered_when_one_is_missing(graph):
    """The editor's dialog reads ``properties.models`` of a loader: the file's name, its address and its folder in models/."""
    notes = "\n".join(n["widgets_values"][0] for n in graph["nodes"] if n["type"] == "MarkdownNote")
    links = {(link[1], link[2]) for link in re.finditer(r"^- \[(.+?)\]\((\S+?/resolve/\S+)\)$", notes, re.MULTILINE)}
    offered = [model for node in graph["nodes"] for model in node.get("properties", {}).get("models", [])]
    assert {(model["name"], model["url"]) for model in offered} == links
    families = (*LOADERS.values(), "kl", "vq")
    entries = {entry.file: entry for family in families for entry in hub.entries(family)}
    for model in offered:
        entry = entries[model["name"]]
        assert model["url"] == f"https://huggingface.co/{entry.repo}/resolve/main/{entry.file}"
        assert model["directory"] == "fastar"
    assert bool(links) == ("## Model links" in notes)


# ------------------------------------------------------------------------------------------------ runs

RELEASED = sorted((FOLDER.parent / "tests" / "workflows").glob("*/*.json"))
# Few steps. Sweep and Advisor run samplers of their own; tests/comfyui runs them.
STEPS = {"ar_steps": 4, "diffusion_steps": 6, "diffusion_steps_end": 0}
RUN = [
    pytest.param(FOLDER / name, id=name, marks=[pytest.mark.slow] if "11" <= name[:2] <= "16" else [])
    for name in GRAPHS
    if not name.startswith(("20", "21")) and ".app." not in name
]


@pytest.fixture(scope="module")
def run():
    return Run(CLASSES, STEPS)


@pytest.mark.parametrize("path", [*RUN, *RELEASED])
def test_it_runs(path, run, monkeypatch):
    monkeypatch.setattr(host.args, "preview_method", Preview.NoPreviews)
    with torch.inference_mode():  # as ComfyUI runs nodes
        outputs = run.graph(json.loads(path.read_text(encoding="utf-8")))
    latents = [out[0]["samples"] for out in outputs.values() if len(out) == 2 and hasattr(out[1], "counts")]
    assert latents and all(latent.isfinite().all() for latent in latents)


# ------------------------------------------------------------------------------------------------ blueprints

BLUEPRINTS = sorted((FOLDER.parent / "subgraphs").glob("*.json"))
ENDS = {-10: "inputs", -20: "outputs"}


@pytest.fixture(params=BLUEPRINTS, ids=lambda path: path.stem)
def blueprint(request):
    """File, its one node and that node's definition. A broken file shows an error to every user of the pack."""
    graph = json.loads(request.param.read_text(encoding="utf-8"))
    (node,), (definition,) = graph["nodes"], graph["definitions"]["subgraphs"]
    return request.param, node, definition


def test_a_blueprint_is_one_node_with_a_definition(blueprint):
    path, node, definition = blueprint
    assert str(uuid.UUID(definition["id"])) == node["type"] and definition["name"] == path.stem
    for side in ("inputs", "outputs"):
        assert [(s["name"], s["type"]) for s in node[side]] == [(s["name"], s["type"]) for s in definition[side]]
    nodes = {str(n["id"]): n for n in definition["nodes"]}
    for number, widget in node["properties"]["proxyWidgets"]:
        inner = nodes[number]
        known = {i.id for i in NODES[inner["type"]].inputs} if inner["type"] in NODES else {"value", "seed"}
        assert widget in known
        assert all(i["link"] is None for i in inner["inputs"] if i["name"] == widget)


def test_inner_nodes_of_blueprints_are_known_and_connected(blueprint):
    _, _, definition = blueprint
    for node in definition["nodes"]:
        assert node["type"] in CORE or node["type"] in NODES
        if node["type"] in NODES:
            values = widget_values(node, NODES[node["type"]])
            for about in (i for i in NODES[node["type"]].inputs if i.kind == "COMBO"):
                assert values[about.id] in about.about["options"]
            linked = {i["name"] for i in node["inputs"] if i["link"] is not None}
            needed = {i.id for i in NODES[node["type"]].inputs if i.kind not in WIDGETS and not i.optional}
            assert needed <= linked, node["type"]


def test_links_of_blueprints_agree_with_both_ends(blueprint):
    _, _, definition = blueprint
    nodes = {node["id"]: node for node in definition["nodes"]}
    for link in definition["links"]:
        number, source, target = link["id"], link["origin_id"], link["target_id"]
        if source in ENDS:
            assert number in definition["inputs"][link["origin_slot"]]["linkIds"]
        else:
            output = nodes[source]["outputs"][link["origin_slot"]]
            assert number in output["links"] and output["type"] == link["type"]
        if target in ENDS:
            assert number in definition["outputs"][link["target_slot"]]["linkIds"]
        else:
            assert nodes[target]["inputs"][link["target_slot"]]["link"] == number
    used = [i["link"] for node in nodes.values() for i in node["inputs"] if i["link"] is not None]
    used += [number for output in definition["outputs"] for number in output["linkIds"]]
    assert sorted(used) == sorted(link["id"] for link in definition["links"])
