"""Every template and blueprint: its name and thumbnail in the gallery, known nodes, values for every widget, links that
lead somewhere, a layout that fits a laptop, a run.

``tests/workflows/VERSION`` holds the graphs of every release, which are opened and run as well; there was none so far.
"""

import itertools
import json
import re
import uuid
from pathlib import Path

import janus_images
import pytest
import torch
from fastar_nodes.lab.training import bitdance_recipe, hybrid_recipe, recipes, token_recipes
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.model_loaders.catalogue.hub import readable_size
from fastar_nodes.nodes import host
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from flat_graphs import INPUTS, OUTPUTS, flat
from graphs import WIDGETS, Run, widget_values
from janus_files import one_file
from PIL import Image
from sampler_nodes import nodes_of
from test_schemas import CLASSES, NODES, widgets_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
TEMPLATES = sorted(FOLDER.glob("*.json"))
# Those that are Apps too: a form of some widgets, which the editor's switch above a graph shows.
APPS = [path for path in TEMPLATES if "linearData" in json.loads(path.read_text("utf-8"))["extra"]]
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))

# In core since 0.27 (Seed) or before, or drawn by the editor alone.
CORE = {
    *("SeedNode", "VAEDecode", "VAEEncode", "SaveImage", "PreviewImage", "PreviewAny", "PrimitiveInt", "LoadImage"),
    *("MarkdownNote", "SolidMask", "MaskComposite", "EmptyImage", "ImageCompositeMasked", "ImageCompare"),
    *("PrimitiveStringMultiline", "ImageScale", "ImageFromBatch", "ComfySwitchNode"),
}
# Files of Load Image: none, because no folder has to hold one.
IMAGES = {""}
# Nodes that run samplers by name, with the settings of the model's file.
BY_NAME = {"FastARSweep", "FastARAnySampler", "FastARAdvisor"}
# What has to be equal for two runs to be compared: steps and
# guidance of a MAR; guidance, temperature and top-k of tokens.
SAMPLERS = {
    "MAR": nodes_of("masked"),
    "tokens": nodes_of("tokens"),
    "blocks": nodes_of("blocks"),
    "continuous": nodes_of("continuous"),
}
SHARED = {
    "MAR": ("steps", "diffusion_steps", "cfg"),
    "tokens": ("cfg", "temperature", "top_k"),
    "blocks": ("diffusion_steps", "cfg", "cfg_schedule"),
    "continuous": ("diffusion_steps", "cfg", "cfg_schedule"),
}
LOADERS = {
    "FastARLoadMAR": "mar",
    "FastARLoadLlamaGen": "llamagen",
    "FastARLoadTar": "tar",
    "FastARLoadTarDetokenizer": "dtok",
    "FastARLoadHarmon": "hybrid",
    "FastARLoadJanus": "janus",
    "FastARLoadBitDance": "bitdance",
    "FastARLoadNextStep": "nextstep",
}
# The widget of web/js/text.js.
TEXT = "last run"
TITLE_BAR = 30
# Width of a collapsed node with a short title.
COLLAPSED = 84
# Room of the canvas at 1366 x 768, in which a template is as large as the editor draws it; and of the two that show all
# wires at 60 %, below which the classic renderer draws no text.
WIDTH, HEIGHT = 1300, 740
WIDTH_OF_ALL, HEIGHT_OF_ALL = 1500, 975


class Graph:
    """A saved graph; a broken one shows an error to every user of the pack."""

    def __init__(self, path: Path):
        self.saved = json.loads(path.read_text(encoding="utf-8"))
        self.definitions = self.saved.get("definitions", {}).get("subgraphs", [])
        whole = flat(self.saved)
        self.nodes = {node["id"]: node for node in whole["nodes"]}
        self.links = {link[0]: link for link in whole["links"]}

    def of(self, *kinds):
        """Its nodes of these types, those in sub-graphs included."""
        return [node for node in self.nodes.values() if node["type"] in kinds]

    def ours(self):
        """Its nodes of this pack, each with its schema."""
        return [(node, NODES[node["type"]]) for node in self.nodes.values() if node["type"] in NODES]

    def sources(self, node):
        """Node behind every connected input of a node."""
        return {i["name"]: self.nodes[self.links[i["link"]][1]] for i in node["inputs"] if i["link"] is not None}

    def samplers(self):
        return self.of(*(kind for kinds in SAMPLERS.values() for kind in kinds), "FastARAnySampler")

    def compares(self):
        return any(len(self.sources(node)) > 2 for node in self.of("FastARCompare", "FastARTimeLapse"))

    def by_name(self):
        return bool(self.of(*BY_NAME))

    def shows_wires(self):
        """Whether it compares samplers without a sub-graph."""
        return self.compares() and not self.definitions

    def notes(self):
        return [node["widgets_values"][0] for node in self.of("MarkdownNote")]

    def boxes(self):
        """Left, top, width and height of every node, with title bar; of a collapsed node, of the title bar."""
        for node in self.saved["nodes"]:
            width, height = (COLLAPSED, 0) if node["flags"].get("collapsed") else node["size"]
            box = (node["pos"][0], node["pos"][1] - TITLE_BAR, width, height + TITLE_BAR)
            yield node.get("title", node["type"]), box

    def groups(self):
        return [(group["title"], group["bounding"]) for group in self.saved["groups"]]


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def graph(path):
    return Graph(path)


@pytest.fixture(params=APPS, ids=lambda path: path.stem)
def app(request):
    return request.param


@pytest.mark.parametrize("path", [*TEMPLATES, *BLUEPRINTS], ids=lambda path: path.stem)
def test_loaders_launch_graphs_on_a_card(path):
    for node, about in Graph(path).ours():
        assert widget_values(node, about).get("speed", "auto") == "auto"


# --- The gallery: names and thumbnails


def test_templates_are_numbered_from_one_in_an_order_that_every_file_system_keeps():
    names = [path.stem for path in TEMPLATES]
    assert [int(name[:2]) for name in names] == [*range(1, len(names) + 1)] and len(names) >= 10
    for path in TEMPLATES:
        assert re.fullmatch(r"\d\d [A-Za-z0-9 ,.-]+", path.stem), "characters that every file system and address takes"
        assert len(path.stem) <= 64


def test_every_template_has_a_square_thumbnail():
    """A JPEG beside it, whose name is the template's, is the one thumbnail that the gallery shows of a pack."""
    for path in TEMPLATES:
        file = path.with_suffix(".jpg")
        assert file.stat().st_size < 200_000
        with Image.open(file) as thumbnail:
            assert (thumbnail.format, thumbnail.size) == ("JPEG", (512, 512)), file.name
            assert min(high - low for low, high in thumbnail.convert("RGB").getextrema()) > 60, "blank"
    assert {path.stem for path in FOLDER.glob("*.jpg")} == {path.stem for path in TEMPLATES}


# --- Nodes and links


def links_agree(nodes, links):
    """Links (id, source, output, target, input, type) are those that both ends name."""
    for link, source, out, target, into, kind in links:
        assert nodes[target]["inputs"][into]["link"] == link
        output = nodes[source]["outputs"][out]
        assert link in output["links"] and kind == output["type"]
    used = [i["link"] for node in nodes.values() for i in node["inputs"] if i["link"] is not None]
    assert sorted(used, key=str) == sorted((link for link, *_ in links), key=str)


def links_inside_agree(definition):
    """The same for the inside of a sub-graph."""
    ends = {INPUTS: {"inputs": [], "outputs": [{**s, "links": s["linkIds"]} for s in definition["inputs"]]}}
    leaving = [{"link": link} for socket in definition["outputs"] for link in socket["linkIds"]]
    ends[OUTPUTS] = {"inputs": leaving, "outputs": []}
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    nodes = ends | {node["id"]: node for node in definition["nodes"]}
    links_agree(nodes, [[link[key] for key in keys] for link in definition["links"]])


def names_of(kind):
    """Widgets that a node can show outside of itself."""
    if kind not in NODES:
        return ["value", "seed", "image", "switch"]
    text = [TEXT] if NODES[kind].hidden else []
    return [widget.id for widget in widgets_of(NODES[kind])] + text


def values_fit(node):
    """Every widget of a node of this pack has a value in its range, or of its menu."""
    values = widget_values(node, NODES[node["type"]])
    for widget in widgets_of(NODES[node["type"]]):
        value, limits = values[widget.id], widget.about
        assert value in limits.get("options", [value]), (node["type"], widget.id)
        assert "min" not in limits or limits["min"] <= value <= limits["max"], (node["type"], widget.id)


def test_nodes_are_known_and_links_agree_with_both_ends(graph):
    assert {node["type"] for node in graph.nodes.values()} <= CORE | set(NODES)
    nodes = {node["id"]: node for node in graph.saved["nodes"]}
    assert len(nodes) == len(graph.saved["nodes"])
    links_agree(nodes, graph.saved["links"])
    for definition in graph.definitions:
        links_inside_agree(definition)


def test_every_widget_has_a_value_in_range_and_sockets_are_the_nodes_own(graph):
    for node, about in graph.ours():
        values_fit(node)
        given = [i["name"] for i in node["inputs"]]
        assert {name.partition(".")[0] for name in given} <= {i.id for i in about.inputs}
        sockets = [i.id for i in about.inputs if i.kind not in WIDGETS]
        if node["type"] in ("FastARCompare", "FastARTimeLapse"):  # a free pair behind the last connected one
            pairs = [int(i["name"].rpartition("_")[2]) for i in node["inputs"] if i["link"] is not None]
            sockets = sockets[: 2 * (max(pairs) + 1)]
        assert given[: len(sockets)] == sockets, f"{node['type']}: a graph lists every socket, connected or not"
        assert [o["name"] for o in node["outputs"]] == [o.id for o in about.outputs]


def ids_of(saved):
    """Ids of the nodes of a saved graph and of its links, those in sub-graphs included."""
    nodes = [node["id"] for node in saved["nodes"]]
    links = [link[0] for link in saved["links"]]
    for definition in saved.get("definitions", {}).get("subgraphs", []):
        nodes += [node["id"] for node in definition["nodes"]]
        links += [link["id"] for link in definition["links"]]
    return nodes, links


def test_ids_are_in_a_range_of_the_template():
    """The editor draws a result on the node with its id, also when the graph of another tab is shown."""
    for path in TEMPLATES:
        number = int(path.stem[:2])
        nodes, links = ids_of(json.loads(path.read_text("utf-8")))
        for ids in (nodes, links):
            assert len({*ids}) == len(ids), path.stem
            assert all(100 * number < value < 100 * (number + 1) for value in ids), path.stem


def test_the_editor_gives_new_nodes_and_links_free_ids(graph):
    """It counts on from the last id, of the graph and of a sub-graph."""
    saved = graph.saved
    assert saved["last_node_id"] >= max(node["id"] for node in saved["nodes"])
    assert saved["last_link_id"] >= max(link[0] for link in saved["links"])
    for definition in graph.definitions:
        assert definition["state"]["lastNodeId"] >= max(node["id"] for node in definition["nodes"])
        assert definition["state"]["lastLinkId"] >= max(link["id"] for link in definition["links"])


def test_graphs_are_told_apart_by_their_ids():
    """The text of a run belongs to the graph with its id."""
    found = [json.loads(path.read_text("utf-8"))["id"] for path in TEMPLATES]
    assert len({*found}) == len(found) and all(uuid.UUID(number) for number in found)


# --- Layout


def apart(a, b) -> bool:
    """Whether two boxes (left, top, width, height) do not overlap."""
    return a[0] >= b[0] + b[2] or b[0] >= a[0] + a[2] or a[1] >= b[1] + b[3] or b[1] >= a[1] + a[3]


def within(inner, outer) -> bool:
    """Whether one box lies in another."""
    sides = [outer[at] <= inner[at] and inner[at] + inner[at + 2] <= outer[at] + outer[at + 2] for at in (0, 1)]
    return all(sides)


def test_a_graph_fits_a_laptop_and_nothing_overlaps(graph):
    boxes, groups = [*graph.boxes()], graph.groups()
    for named in (boxes, groups):
        for (one, a), (other, b) in itertools.combinations(named, 2):
            assert apart(a, b), f"{one} and {other}"

    whole = [box for _, box in [*boxes, *groups]]
    left, top = (min(box[at] for box in whole) for at in (0, 1))
    right, bottom = (max(box[at] + box[at + 2] for box in whole) for at in (0, 1))
    room = (WIDTH_OF_ALL, HEIGHT_OF_ALL) if graph.shows_wires() else (WIDTH, HEIGHT)
    assert right - left <= room[0] and bottom - top <= room[1], (right - left, bottom - top)

    if groups:
        for name, box in boxes:
            assert [within(box, group) for _, group in groups].count(True) == 1, name


# --- Words


def test_files_are_offered_when_one_is_missing(graph):
    """The editor's dialog reads ``properties.models`` of a loader:
    the file's name, its address and its folder in models/.
    """
    entries = {entry.file: entry for family in (*LOADERS.values(), "kl", "vq") for entry in hub.entries(family)}
    for node in graph.nodes.values():
        for model in node.get("properties", {}).get("models", []):
            entry = entries[model["name"]]
            assert model["url"] == f"https://huggingface.co/{entry.repo}/resolve/main/{entry.file}"
            assert model["directory"] == "fastar"


# --- Models and settings


def entry_of(loader):
    choice = loader["widgets_values"][0]
    return next(e for e in hub.entries(LOADERS[loader["type"]]) if choice in (e.id, e.label))


def test_a_template_needs_no_file_and_no_download_or_says_so_in_its_name(path, graph):
    """Janus has no demo: its loader says how large the download is, and does not begin it."""
    loaders = graph.of(*LOADERS)
    assert loaders
    downloads = []
    for node in loaders:
        entry = entry_of(node)
        values = widget_values(node, NODES[node["type"]])
        assert values.get("allow_download", False) is False
        assert not entry.missing, f"{entry.id} does not come with the package"
        if not entry.built_in:
            size = readable_size(entry.size) if entry.size else entry.note
            assert size in node["widgets_values"][0], "the menu says the size"
            downloads.append(f"{entry.size / 1e9:.1f} GB" if entry.size else size)
    said = re.findall(r"download of ([\d.]+ GB(?: or more)?)", path.stem)
    assert said == downloads
    assert {node["widgets_values"][0] for node in graph.of("LoadImage")} <= IMAGES


# Words of a note that promise an image equal to another sampler's.
PROMISES = re.compile(r"\bexact|token for token|the same image\b|identical", re.IGNORECASE)


def test_a_template_that_promises_equal_images_computes_in_fp32(path, graph):
    """With dtype auto, which is bf16 on most graphics cards, 7 of 25 images of exact parallel decoding equal those
    of serial decoding.
    """
    promised = PROMISES.search("\n".join([path.stem, *graph.notes()])) is not None
    for node in graph.of(*LOADERS):
        if node["type"] == "FastARLoadTar":  # the sampler decides
            continue
        dtype = widget_values(node, NODES[node["type"]])["dtype"]
        assert dtype in (["fp32"] if promised else ["auto", "fp32"]), node["type"]


def recorded(loader):
    """The numbers that the demo file of a loader carries, of those in SHARED."""
    checkpoint = loader["widgets_values"][0]
    if loader["type"] == "FastARLoadBitDance":
        return [bitdance_recipe.DEFAULTS[name] for name in SHARED["blocks"]]
    if loader["type"] in ("FastARLoadMAR", "FastARLoadHarmon"):
        masked = hybrid_recipe.DEFAULTS if loader["type"] == "FastARLoadHarmon" else recipes.DEFAULTS
        return [masked[name] for name in SHARED["MAR"]]

    grid = token_recipes.GRID if checkpoint in ("demo-llamagen", "demo-dtok") else token_recipes.LOW_GRID
    asked = token_recipes.token_defaults(grid) if checkpoint == "demo-dtok" else token_recipes.defaults(grid)
    tokens = LlamaGenSettings(**{name: asked[name] for name in token_recipes.DEFAULTS})
    return [getattr(tokens, name) for name in SHARED["tokens"]]


def test_samplers_that_are_compared_share_their_settings(graph):
    """Otherwise the speed-up would be another thing's. They are the numbers that the demo's files carry."""
    found = [(node, family) for family, kinds in SAMPLERS.items() for node in graph.of(*kinds)]
    assert found or graph.by_name()
    assert len(found) > 1 or not graph.compares() or graph.by_name()
    for node, family in found:
        values = widget_values(node, NODES[node["type"]])
        given = graph.sources(node)
        loader = given.get("target", given.get("model"))
        without_demo = loader["type"] in ("FastARLoadJanus", "FastARLoadNextStep")
        if without_demo or values["preset"] == "fast":  # LazyMAR's fast sets the steps too
            continue
        assert [values[name] for name in SHARED[family]] == recorded(loader), node["type"]


def test_samplers_share_condition_and_seed(graph):
    """One Class Label or Prompt and one seed feed all of them."""
    samplers = graph.samplers()
    if not graph.compares():
        assert len(samplers) == 1 or graph.by_name() or graph.of("ComfySwitchNode")  # which leaves one out
        return
    inputs = [graph.sources(node) for node in samplers]
    for name in ("condition", "seed"):
        assert len({str(given[name]["id"]) for given in inputs}) == 1 or graph.by_name()
    for given in inputs:
        assert given["seed"]["type"] == "SeedNode"


def test_seeds_are_fixed(graph):
    """Everyone sees the image of the thumbnail first."""
    for node in graph.of("SeedNode"):
        assert node["widgets_values"][1] == "fixed"
    for node, about in graph.ours():
        for widget in widgets_of(about):
            if widget.about.get("control_after_generate"):
                position = [w.id for w in widgets_of(about)].index(widget.id)
                assert node["widgets_values"][position + 1] == "fixed", node["type"]


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


def test_every_compared_image_is_paired_with_its_own_numbers(graph):
    for node in graph.of("FastARCompare", "FastARTimeLapse", "FastARTokenMap"):
        into = graph.sources(node)
        for name in (name for name in into if name.startswith("report")):
            image = into[name.replace("report", "image")]
            if image["type"] == "VAEDecode":
                assert graph.sources(image)["samples"] is into[name]
        if node["type"] == "FastARCompare":
            labels, images = node["widgets_values"][0], sum(name.startswith("image") for name in into)
            assert not labels or len(labels.split("\n")) == images, "a line an image"


# --- Apps


def widget_of(graph, number, widget):
    """The node whose widget an App lists: of a sub-graph node, the one inside, or None for a value of its own."""
    node = next(node for node in graph.saved["nodes"] if node["id"] == number)
    for inner, name in node["properties"].get("proxyWidgets", []):
        if name == widget:
            return graph.nodes[f"{number}:{inner}"]
    if node["type"] in {definition["id"] for definition in graph.definitions}:
        assert [widget] == [i["widget"]["name"] for i in node["inputs"] if i.get("widget") and i["link"] is None]
        return None
    return node


def test_an_app_has_inputs_and_a_result_and_opens_as_a_graph(app):
    """linearMode would open it as an App, without the note that says what it is."""
    graph = Graph(app)
    shown = graph.saved["extra"]["linearData"]
    *previews, last = [graph.nodes[number]["type"] for number in shown["outputs"]]
    assert shown["inputs"] and last == "SaveImage" and previews == ["PreviewImage"] * len(graph.of("PreviewImage"))
    for number, widget in shown["inputs"]:
        node = widget_of(graph, number, widget)
        if node is not None:
            assert widget in names_of(node["type"]) and widget not in graph.sources(node), (number, widget)

    assert "linearMode" not in graph.saved["extra"]


def test_an_app_offers_the_download_that_it_needs(app):
    graph = Graph(app)
    inputs = graph.saved["extra"]["linearData"]["inputs"]
    for node in graph.of(*LOADERS):
        if not entry_of(node).built_in:
            assert [node["id"], "allow_download"] in inputs


# --- Runs


RELEASED = sorted((ROOT / "tests" / "workflows").glob("*/*.json"))
# Others are slow.
FAST = ("06", "08")
# Few steps. Sweep and Advisor run samplers of their own; tests/comfyui runs them.
STEPS = {"steps": 2, "diffusion_steps": 4, "diffusion_steps_end": 4}
RUN = [
    pytest.param(path, id=path.stem, marks=[] if path.name.startswith(FAST) else [pytest.mark.slow])
    for path in TEMPLATES
    if not Graph(path).of("FastARSweep", "FastARAdvisor")
]


@pytest.fixture(scope="module")
def run():
    return Run(CLASSES, STEPS)


@pytest.fixture(scope="module")
def janus(tmp_path_factory):
    """Files that stand for a Janus, by the beginning of the menu's choice."""
    folder = tmp_path_factory.mktemp("janus")
    return {
        "janus-pro": one_file(folder / "janus.safetensors"),
        "janus-4o": janus_images.one_file(folder / "editor.safetensors"),
    }


# NextStep's width and height are of the published autoencoder; tests/comfyui runs its template on a tiny model, to
# which the editor leaves them.
@pytest.mark.parametrize("path", [*(case for case in RUN if "NextStep" not in case.id), *RELEASED])
def test_it_runs(path, run, janus, monkeypatch):
    monkeypatch.setattr(host.queue, "previews_wanted", lambda: False)
    resolve = hub.resolve
    monkeypatch.setattr(hub, "absent", lambda *_: None)

    def find(choice, kind, *more):
        if kind != "janus":
            return resolve(choice, kind, *more)
        return next(path for name, path in janus.items() if choice.startswith(name))

    monkeypatch.setattr(hub, "resolve", find)
    with torch.inference_mode():  # as ComfyUI runs nodes
        outputs = run.graph(json.loads(path.read_text(encoding="utf-8")))
    latents = [out[0]["samples"] for out in outputs.values() if len(out) == 2 and hasattr(out[1], "counts")]
    assert latents and all(latent.isfinite().all() for latent in latents)


@pytest.mark.parametrize("path", [case for case in RUN if "download" not in case.id])
def test_no_template_warns_about_itself(path, monkeypatch):
    """With the settings that it is saved with; tests/comfyui has those of Sweep and Advisor too."""
    monkeypatch.setattr(host.queue, "previews_wanted", lambda: False)
    warned = []
    told = host.text.output

    def tell(figures, warnings=(), *more):
        warned.extend(filter(None, warnings))
        return told(figures, warnings, *more)

    monkeypatch.setattr(host.text, "output", tell)
    with torch.inference_mode():
        Run(CLASSES, {}).graph(json.loads(path.read_text(encoding="utf-8")))
    assert not warned


# --- Sub-graphs: those of templates, and the blueprints of the node menu


def _subgraphs():
    """Sub-graph nodes with their definitions, of blueprints and templates."""
    for path in [*BLUEPRINTS, *TEMPLATES]:
        saved = json.loads(path.read_text(encoding="utf-8"))
        for definition in saved.get("definitions", {}).get("subgraphs", []):
            (node,) = [node for node in saved["nodes"] if node["type"] == definition["id"]]
            yield pytest.param((node, definition), id=f"{definition['name']} in {path.stem}")


@pytest.fixture(params=_subgraphs())
def subgraph(request):
    """A node and its definition."""
    return request.param


@pytest.mark.parametrize("path", BLUEPRINTS, ids=lambda path: path.stem)
def test_a_blueprint_is_one_node_and_is_named_as_its_file(path):
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert len(saved["nodes"]) == 1
    (definition,) = saved["definitions"]["subgraphs"]
    assert definition["name"] == path.stem
    links_inside_agree(definition)


def test_a_subgraph_node_has_the_sockets_of_its_definition_and_widgets_of_nodes_inside(subgraph):
    node, definition = subgraph
    assert str(uuid.UUID(definition["id"])) == node["type"]
    for side in ("inputs", "outputs"):
        assert [(s["name"], s["type"]) for s in node[side]] == [(s["name"], s["type"]) for s in definition[side]]
    nodes = {str(n["id"]): n for n in definition["nodes"]}
    promoted = node["properties"].get("proxyWidgets", [])
    assert len({widget for _, widget in promoted}) == len(promoted), "every widget has a name of its own"
    for number, widget in promoted:
        inner = nodes[number]
        assert widget in names_of(inner["type"])
        assert all(i["link"] is None for i in inner["inputs"] if i["name"] == widget)

    for shown in node["properties"].get("previewExposures", []):
        assert nodes[shown["sourceNodeId"]]["type"] == "FastARCompare"


def test_nodes_inside_are_known_and_connected(subgraph):
    _, definition = subgraph
    for node in definition["nodes"]:
        assert node["type"] in CORE or node["type"] in NODES
        if node["type"] in NODES:
            values_fit(node)
            linked = {i["name"] for i in node["inputs"] if i["link"] is not None}
            needed = {i.id for i in NODES[node["type"]].inputs if i.kind not in WIDGETS and not i.optional}
            assert needed <= linked, node["type"]
