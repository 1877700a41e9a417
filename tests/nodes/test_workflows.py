"""Every shared graph and blueprint: known nodes, values for every
widget, links that lead somewhere, a layout that can be read, a run.

``tests/workflows/VERSION`` holds the graphs of every release, which are opened and run as well; there was none so far.
"""

import itertools
import json
import re
import uuid
from pathlib import Path

import pytest
import torch
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.hub import readable_size
from fastar_nodes.nodes import host
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.tools.training import hybrid_recipe, recipes, token_recipes
from flat_graphs import flat
from graphs import WIDGETS, Run, widget_values
from janus_files import one_file
from test_schemas import CLASSES, NODES, widgets_of

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
GRAPHS = sorted(path.name for path in FOLDER.glob("*.json"))
# In core since 0.27 (Seed) or before, or drawn by the editor alone.
CORE = {
    *("SeedNode", "VAEDecode", "VAEEncode", "SaveImage", "PreviewImage", "PreviewAny", "PrimitiveInt", "LoadImage"),
    *("MarkdownNote", "SolidMask", "MaskComposite", "EmptyImage", "ImageCompositeMasked", "ImageCompare"),
    *("PrimitiveStringMultiline", "ImageScale", "ImageFromBatch"),
}
# Nodes that run samplers by name, with the settings of the model's file.
BY_NAME = {"FastARSweep", "FastARAnySampler"}
# What has to be equal for two runs to be compared: steps and
# guidance of a MAR; guidance, temperature and top-k of tokens.
SAMPLERS = {
    "MAR": ("FastARMARSampler", "FastARFastHybridSampler", "FastARLazyMARSampler", "FastARCSpDSampler"),
    "tokens": ("FastARLlamaGenSampler", "FastARPARSampler", "FastARZipARSampler", "FastARMuLoSDSampler"),
}
SHARED = {"MAR": ("steps", "diffusion_steps", "cfg"), "tokens": ("cfg", "temperature", "top_k")}
LOADERS = {
    "FastARLoadMAR": "mar",
    "FastARLoadLlamaGen": "llamagen",
    "FastARLoadTar": "tar",
    "FastARLoadTarDetokenizer": "dtok",
    "FastARLoadHarmon": "hybrid",
    "FastARLoadJanus": "janus",
}
STARTERS = sorted(name for name in GRAPHS if name.endswith(".app.json"))
# Height by which the live preview and the status line enlarge a sampler, by family.
PREVIEW = {"MAR": 312, "tokens": 270}


class Graph:
    """A saved graph; a broken one shows an error to every user of the pack."""

    def __init__(self, path: Path):
        self.saved = json.loads(path.read_text(encoding="utf-8"))
        whole = flat(self.saved)
        self.nodes = {node["id"]: node for node in whole["nodes"]}
        self.links = {link[0]: link for link in whole["links"]}

    def of(self, *kinds):
        """Its nodes of these types."""
        return [node for node in self.nodes.values() if node["type"] in kinds]

    def ours(self):
        """Its nodes of this pack, each with its schema."""
        return [(node, NODES[node["type"]]) for node in self.nodes.values() if node["type"] in NODES]

    def sources(self, node):
        """Node behind every connected input of a node."""
        return {i["name"]: self.nodes[self.links[i["link"]][1]] for i in node["inputs"] if i["link"] is not None}

    def compares(self):
        return bool(self.of("FastARCompare", "FastARTimeLapse"))

    def by_name(self):
        return bool(self.of(*BY_NAME))

    def boxes(self):
        """Left, top, width and height of every node, with title bar; of a collapsed node, of the title bar."""
        for node in self.saved["nodes"]:
            height = 0 if node["flags"].get("collapsed") else node["size"][1]
            if height and node["type"] in LOADERS:  # the classic renderer enlarges a node whose rows do not fit
                rows = len([i for i in NODES[node["type"]].inputs if i.kind in WIDGETS])
                height = max(height, 20 * len(node["outputs"]) + 24 * rows + 14)
            yield node["type"], (node["pos"][0], node["pos"][1] - 30, node["size"][0], height + 30)

    def zoom(self, width=1440, height=900):
        """Zoom at which the editor opens it as a template: the
        nodes and a margin of 10 take three quarters of the window.
        """
        boxes = [box for _, box in self.boxes()]
        right, bottom = (max(b[k] + b[k + 2] for b in boxes) for k in (0, 1))
        left, top = (min(b[k] for b in boxes) for k in (0, 1))
        return 0.75 * min(width / (right - left + 20), height / (bottom - top + 20))

    def presets(self):
        """The widgets of its samplers, by family."""
        found = {}
        for family, kinds in SAMPLERS.items():
            if nodes := self.of(*kinds):
                found[family] = [widget_values(node, NODES[node["type"]]) for node in nodes]
        return found


@pytest.fixture(params=GRAPHS)
def graph(request):
    return Graph(FOLDER / request.param)


def apart(a, b) -> bool:
    """Whether two boxes (left, top, width, height) do not overlap."""
    return a[0] >= b[0] + b[2] or b[0] >= a[0] + a[2] or a[1] >= b[1] + b[3] or b[1] >= a[1] + a[3]


def test_every_graph_has_a_thumbnail_and_every_family_a_starter():
    assert GRAPHS and len(STARTERS) == 5
    for name in GRAPHS:
        picture = (FOLDER / name).with_suffix(".jpg").read_bytes()
        assert picture[:2] == b"\xff\xd8" and len(picture) < 200_000


def links_agree(nodes, links):
    """Links (id, source, output, target, input, type) are those that both ends name."""
    for link, source, out, target, into, kind in links:
        assert nodes[target]["inputs"][into]["link"] == link
        output = nodes[source]["outputs"][out]
        assert link in output["links"] and kind == output["type"]
    used = [i["link"] for node in nodes.values() for i in node["inputs"] if i["link"] is not None]
    assert sorted(used, key=str) == sorted((link for link, *_ in links), key=str)


def names_of(about):
    """Widgets of a node."""
    return [widget.id for widget in widgets_of(about)]


def values_fit(node):
    """Every widget of a node of this pack has a value in its range, or of its menu."""
    values = widget_values(node, NODES[node["type"]])
    for widget in widgets_of(NODES[node["type"]]):
        value, limits = values[widget.id], widget.about
        assert value in limits.get("options", [value]), (node["type"], widget.id)
        assert "min" not in limits or limits["min"] <= value <= limits["max"], (node["type"], widget.id)


def test_nodes_are_known_and_links_agree_with_both_ends(graph):
    assert {node["type"] for node in graph.nodes.values()} <= CORE | set(NODES)
    numbers = {node["id"] for node in graph.saved["nodes"]}
    assert len(numbers) == len(graph.saved["nodes"]) and graph.saved["last_node_id"] == max(numbers)
    links_agree(graph.nodes, graph.links.values())


def test_every_widget_has_a_value_in_range_and_sockets_are_the_nodes_own(graph):
    for node, about in graph.ours():
        values_fit(node)
        given = [i["name"] for i in node["inputs"]]
        assert {name.partition(".")[0] for name in given} <= {i.id for i in about.inputs}
        sockets = [i.id for i in about.inputs if i.kind not in WIDGETS]
        if node["type"] == "FastARCompare":  # the editor shows a free pair behind the last connected one
            pairs = [int(i["name"].rpartition("_")[2]) for i in node["inputs"] if i["link"] is not None]
            sockets = sockets[: 2 * min(8, max(pairs) + 1)]
        assert given[: len(sockets)] == sockets, f"{node['type']}: a graph lists every socket, connected or not"
        assert [o["name"] for o in node["outputs"]] == [o.id for o in about.outputs]


def test_a_graph_opens_readable_and_nothing_overlaps(graph):
    """Below 60 % the editor draws no text. Every node is in one
    group, with room for a live preview above the next node.
    """
    assert graph.zoom() >= 0.6
    groups = [group["bounding"] for group in graph.saved["groups"]]
    assert max(y + h for _, y, _, h in groups) * graph.zoom() <= 900
    grown = {kind: PREVIEW[family] for family, kinds in SAMPLERS.items() for kind in kinds}
    boxes = list(graph.boxes())
    assert all(apart(a, b) for (_, a), (_, b) in itertools.combinations(boxes, 2))
    assert all(apart(a, b) for a, b in itertools.combinations(groups, 2))
    for kind, (x, y, w, h) in boxes:
        if kind == "MarkdownNote":
            continue
        opened_up = kind in grown and h > 30  # not collapsed
        high = y + h + (grown[kind] if opened_up else 0)
        inside = [gx <= x and x + w <= gx + gw and gy <= y and high <= gy + gh for gx, gy, gw, gh in groups]
        assert inside.count(True) == 1, kind
        if opened_up:
            assert all(high <= b[1] for _, b in boxes if b[1] > y and b[0] < x + w and x < b[0] + b[2]), kind


def test_templates_are_found_by_the_packs_name():
    """The template browser searches file names only."""
    assert all(re.match(r"FastAR \d\d \w", name) for name in GRAPHS)


def test_seeds_are_core_seed_nodes(graph):
    seeds = [
        source["type"] for n in graph.nodes.values() for name, source in graph.sources(n).items() if name == "seed"
    ]
    assert (seeds or graph.by_name()) and {*seeds} <= {"SeedNode"}


def test_a_new_graph_needs_no_file_and_no_download(graph):
    """Janus has no demo: its loader says how large the download is, and does not begin it."""
    loaders = graph.of(*LOADERS)
    assert loaders
    for node in loaders:
        choice, *others = node["widgets_values"]
        entry = next(entry for entry in hub.entries(LOADERS[node["type"]]) if choice in (entry.id, entry.label))
        if node["type"] == "FastARLoadJanus":
            assert choice == entry.label and readable_size(entry.size) in choice
        else:
            assert entry.built_in and not entry.missing, f"{choice} does not come with the package"
        assert set(others) <= {"auto", "fp32", "plain", False}


# Where it is in the widgets of a loader.
DTYPE = {
    **dict.fromkeys(("FastARLoadMAR", "FastARLoadLlamaGen", "FastARLoadHarmon"), 2),
    **dict.fromkeys(("FastARLoadTar", "FastARLoadJanus"), 1),
    "FastARLoadTarDetokenizer": 3,
}
# Words of a note that promise an image equal to another sampler's.
PROMISES = re.compile(r"\bexact|token for token|the same image\b|identical", re.IGNORECASE)


def test_a_template_that_promises_equal_images_computes_in_fp32(graph):
    """With dtype auto, which is bf16 on most graphics cards, 7 of 25 images of graph 12 equal those
    of serial decoding.
    """
    notes = "\n".join(str(n["widgets_values"]) for n in graph.saved["nodes"] if n["type"] == "MarkdownNote")
    conditional = "in fp32 the image of serial decoding" in notes  # graph 22, which states both precisions
    promised = PROMISES.search(notes) is not None and not conditional
    samplers_decide = [n for n in graph.of(*LOADERS) if n["type"] != "FastARLoadTar"]
    for node in samplers_decide:
        position = DTYPE[node["type"]]
        assert node["widgets_values"][position] == ("fp32" if promised else "auto"), node["type"]


def test_samplers_that_are_compared_share_their_settings(graph):
    """Otherwise the speed-up would be another thing's. They are the numbers that the demo's files carry."""
    large = any(n["widgets_values"][0] == "demo-llamagen" for n in graph.of("FastARLoadLlamaGen"))
    asked = token_recipes.defaults(token_recipes.GRID if large else token_recipes.LOW_GRID)
    tokens = LlamaGenSettings(**{name: asked[name] for name in token_recipes.DEFAULTS})
    masked = hybrid_recipe.DEFAULTS if graph.of("FastARLoadHarmon") else recipes.DEFAULTS
    record = {"MAR": [masked[name] for name in SHARED["MAR"]]}
    record["tokens"] = [getattr(tokens, name) for name in SHARED["tokens"]]
    assert graph.presets() or graph.by_name()
    for family, found in graph.presets().items():
        # LazyMAR's fast sets the steps too.
        shared = [[preset[name] for name in SHARED[family]] for preset in found if preset["preset"] != "fast"]
        large_model = not graph.of("FastARLoadJanus")
        assert all(values == record[family] for values in shared) or not large_model
        assert len(found) > 1 or not graph.compares() or graph.by_name()


def test_samplers_share_label_and_seed(graph):
    """One Class Label, or Tar's one prompt, and one seed feed all of them;
    an edit has one of each for the image and one for what is painted in.
    """
    samplers = graph.of(*(kind for kinds in SAMPLERS.values() for kind in kinds), "FastARAnySampler")
    if not graph.compares():
        assert len(samplers) == 1 or graph.by_name()
        return
    inputs = [graph.sources(node) for node in samplers]
    edits = any("mask" in given for given in inputs)
    for name in ("condition", "seed"):
        fed = {given[name]["id"]: given[name] for given in inputs}
        prompts = [graph.sources(node) for node in fed.values() if node["type"] == "FastARTarPrompt"]
        if len(prompts) > 1:  # in several details: one text, one seed, one model
            assert len(prompts) == len(fed) and {"tar", "text", "seed"} <= set(prompts[0])
            assert all(prompt == prompts[0] for prompt in prompts)
        else:
            assert len(fed) == (2 if edits else 1)


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_is_small_and_its_app_is_the_same_graph(name):
    """Five or six nodes, the seed, and the enlargement with its own file."""
    app, starter = json.loads((FOLDER / name).read_text("utf-8")), Graph(FOLDER / name.replace(".app.", "."))
    own = [n for n in starter.nodes.values() if n["type"] not in ("MarkdownNote", "SeedNode", "ImageScale")]
    assert 5 <= len(own) - len(starter.of("ImageScale")) <= 6
    assert starter.zoom() >= 0.7
    shown = starter.saved["extra"]["linearData"]
    assert shown["inputs"] and [starter.nodes[number]["type"] for number in shown["outputs"]] == ["SaveImage"]
    for number, widget in shown["inputs"]:
        node = starter.nodes[number]
        known = names_of(NODES[node["type"]]) if node["type"] in NODES else ["seed"]
        assert widget in known and widget not in starter.sources(node)
    assert app["id"] != starter.saved["id"] and app["extra"].pop("linearMode") is True
    assert "linearMode" not in starter.saved["extra"] and {**app, "id": starter.saved["id"]} == starter.saved


def test_models_drafts_and_decoders_fit(graph):
    """A draft is the smaller model of its target; an image is decoded with its own model's decoder."""
    for node in graph.of("FastARMuLoSDSampler"):
        target, draft = (graph.sources(node)[name] for name in ("target", "draft"))
        assert target["type"] == draft["type"]
        assert hub.draft_for(target["widgets_values"][0]) == draft["widgets_values"][0]
    for node in graph.of("VAEDecode"):
        sampler, loader = (graph.sources(node)[name] for name in ("samples", "vae"))
        given = graph.sources(sampler)
        model = given.get("target", given.get("model"))
        assert model["type"] == loader["type"]
        if loader["type"] != "FastARLoadMAR":  # the demo's KL decoder is the draft's too
            assert model is loader


def test_every_compared_picture_is_paired_with_its_own_numbers(graph):
    for node in graph.of("FastARCompare", "FastARTimeLapse", "FastARTokenMap"):
        into = graph.sources(node)
        for name in (name for name in into if name.startswith("report")):
            picture = into[name.replace("report", "image")]
            if picture["type"] == "VAEDecode":
                assert graph.sources(picture)["samples"] is into[name]
        if node["type"] == "FastARCompare":
            labels, pictures = node["widgets_values"][0], sum(name.startswith("image") for name in into)
            assert not labels or len(labels.split("\n")) == pictures, "a line an image"


def test_a_note_says_what_to_do_and_its_files_are_offered_when_one_is_missing(graph):
    """The editor's dialog reads ``properties.models`` of a loader:
    the file's name, its address and its folder in models/.
    """
    (note,) = (node["widgets_values"][0] for node in graph.of("MarkdownNote"))
    assert all(word in note for word in ("Press **Run**", "### Try", "### Official checkpoints"))
    links = {(link[1], link[2]) for link in re.finditer(r"^- \[(.+?)\]\((\S+?/resolve/\S+)\)$", note, re.MULTILINE)}
    offered = [model for node in graph.nodes.values() for model in node.get("properties", {}).get("models", [])]
    assert {(model["name"], model["url"]) for model in offered} == links
    entries = {entry.file: entry for family in (*LOADERS.values(), "kl", "vq") for entry in hub.entries(family)}
    for model in offered:
        entry = entries[model["name"]]
        assert model["url"] == f"https://huggingface.co/{entry.repo}/resolve/main/{entry.file}"
        assert model["directory"] == "fastar"
    assert bool(links) == ("## Model links" in note)


RELEASED = sorted((FOLDER.parent / "tests" / "workflows").glob("*/*.json"))
# Others are slow.
FAST = ("FastAR 01", "FastAR 04", "FastAR 10")
# Few steps. Sweep and Advisor run samplers of their own; tests/comfyui runs them.
STEPS = {"steps": 2, "diffusion_steps": 4, "diffusion_steps_end": 4}
RUN = [
    pytest.param(FOLDER / name, id=name, marks=[] if name.startswith(FAST) else [pytest.mark.slow])
    for name in GRAPHS
    if not name.startswith(("FastAR 20", "FastAR 21")) and ".app." not in name
]


@pytest.fixture(scope="module")
def run():
    return Run(CLASSES, STEPS)


@pytest.fixture(scope="module")
def janus(tmp_path_factory):
    """The file that stands for Janus-Pro."""
    return one_file(tmp_path_factory.mktemp("janus") / "janus.safetensors")


@pytest.mark.parametrize("path", [*RUN, *RELEASED])
def test_it_runs(path, run, janus, monkeypatch):
    monkeypatch.setattr(host, "previews_wanted", lambda: False)
    resolve = hub.resolve
    monkeypatch.setattr(hub, "absent", lambda *_: None)
    monkeypatch.setattr(hub, "resolve", lambda *a: janus if a[1] == "janus" else resolve(*a))
    with torch.inference_mode():  # as ComfyUI runs nodes
        outputs = run.graph(json.loads(path.read_text(encoding="utf-8")))
    latents = [out[0]["samples"] for out in outputs.values() if len(out) == 2 and hasattr(out[1], "counts")]
    assert latents and all(latent.isfinite().all() for latent in latents)


BLUEPRINTS = sorted((FOLDER.parent / "subgraphs").glob("*.json"))


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
    for number, widget in node["properties"].get("proxyWidgets", []):
        inner = nodes[number]
        known = names_of(NODES[inner["type"]]) if inner["type"] in NODES else ["value", "seed"]
        assert widget in known
        assert all(i["link"] is None for i in inner["inputs"] if i["name"] == widget)


def test_inner_nodes_of_blueprints_are_known_and_connected(blueprint):
    _, _, definition = blueprint
    for node in definition["nodes"]:
        assert node["type"] in CORE or node["type"] in NODES
        if node["type"] in NODES:
            values_fit(node)
            linked = {i["name"] for i in node["inputs"] if i["link"] is not None}
            needed = {i.id for i in NODES[node["type"]].inputs if i.kind not in WIDGETS and not i.optional}
            assert needed <= linked, node["type"]


def test_links_of_blueprints_agree_with_both_ends(blueprint):
    _, _, definition = blueprint
    ends = {-10: {"inputs": [], "outputs": [{**s, "links": s["linkIds"]} for s in definition["inputs"]]}}
    ends[-20] = {"inputs": [{"link": link} for s in definition["outputs"] for link in s["linkIds"]], "outputs": []}
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    nodes = ends | {node["id"]: node for node in definition["nodes"]}
    links_agree(nodes, [[link[key] for key in keys] for link in definition["links"]])
