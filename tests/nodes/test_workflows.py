"""Every shared graph: only known nodes, values for every widget, links that lead somewhere, nothing on top of each other."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from test_node_schemas import NODES, WIDGETS

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
GRAPHS = sorted(path.name for path in FOLDER.glob("*.json"))
# In core since before 0.14, or drawn by the editor alone.
CORE = {
    "VAEDecode", "VAEEncode", "SaveImage", "PreviewImage", "PreviewAny", "PrimitiveInt", "LoadImage", "MarkdownNote",
    "SolidMask", "MaskComposite", "EmptyImage", "ImageCompositeMasked",
}  # fmt: skip
SAMPLERS = ("FastARMARSampler", "FastARFastHybrid", "FastARLazyMAR", "FastARCSpD")


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
        given = list(node["widgets_values"])
        for about in (i for i in NODES[node["type"]].inputs if i.kind in WIDGETS):
            value = given.pop(0)
            if about.kind == "COMBO":
                assert value in about.about["options"], (node["type"], about.id)
            if about.kind in ("INT", "FLOAT"):
                assert about.about["min"] <= value <= about.about["max"], (node["type"], about.id)
            if about.about.get("control_after_generate"):
                assert given.pop(0) in ("fixed", "randomize", "increment", "decrement")
        assert not given, node["type"]


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
            assert given[: len(sockets)] == sockets, f"{node['type']}: a graph lists every socket, connected or not"
            assert [o["name"] for o in node["outputs"]] == [o.id for o in NODES[node["type"]].outputs]


def test_nothing_overlaps(graph):
    boxes = [(n["type"], n["pos"][0], n["pos"][1] - 30, n["size"][0], n["size"][1] + 30) for n in graph["nodes"]]
    for (a, ax, ay, aw, ah), (b, bx, by, bw, bh) in itertools.combinations(boxes, 2):
        assert not (ax < bx + bw and bx < ax + aw and ay < by + bh and by < ay + ah), (a, b)


def test_groups_hold_whole_nodes_and_do_not_touch(graph):
    boxes = [group["bounding"] for group in graph["groups"]]
    for (ax, ay, aw, ah), (bx, by, bw, bh) in itertools.combinations(boxes, 2):
        assert not (ax < bx + bw and bx < ax + aw and ay < by + bh and by < ay + ah)
    for node in (n for n in graph["nodes"] if n["type"] != "MarkdownNote"):
        (x, y), (w, h) = node["pos"], node["size"]
        assert [gx <= x and x + w <= gx + gw and gy <= y - 30 and y + h <= gy + gh for gx, gy, gw, gh in boxes].count(True) == 1, node


def test_a_new_graph_needs_no_file_and_no_download(graph):
    for node in graph["nodes"]:
        if node["type"] == "FastARLoadMAR":
            assert node["widgets_values"][0] in ("demo", "demo-draft")


def test_a_note_says_what_to_do(graph):
    (note,) = (n for n in graph["nodes"] if n["type"] == "MarkdownNote")
    assert all(word in note["widgets_values"][0] for word in ("Press **Run**", "### Try", "### Official checkpoints"))


def test_samplers_that_are_compared_share_their_settings(graph):
    """Otherwise the speed-up under the pictures would be another thing's."""
    main = [n["widgets_values"][2:5] for n in graph["nodes"] if n["type"] in SAMPLERS]
    assert len(main) > 1 and all(values == main[0] for values in main)
