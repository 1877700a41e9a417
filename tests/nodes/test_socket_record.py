"""The values of sockets: one table in nodes/sockets.py, which docs/sockets.md shows and ``sockets.json`` records.

Packs of others depend on the attributes of a kind and its version. After an intended change of the table, record it
with ``python tests/nodes/test_socket_record.py``, which also writes the table of the page. It refuses a change that
breaks other packs if the version of the kind does not rise: an attribute that leaves, holds something else or is needed
from now on, or a socket that leaves. A new attribute that may be left out keeps the version.
"""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
    import checkout  # noqa: F401  the package under its name
    import fake_comfy

    fake_comfy.install()

from fastar_nodes.lab.docs import figures
from fastar_nodes.nodes import caches, compare, editing, host, sockets
from fastar_nodes.nodes.sockets import VALUES, Kind
from fastar_nodes.samplers import conditioning

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "sockets.md"
GOLDEN = Path(__file__).with_name("sockets.json")
NAME = "sockets"  # of the block on the page

CLASSES = [
    conditioning.ClassCondition,
    sockets.LabelText,
    conditioning.PromptCondition,
    conditioning.ImagePromptCondition,
    conditioning.TextCondition,
    conditioning.CodeCondition,
    conditioning.FeatureCondition,
    host.loaded.Loaded,
    compare.Report,
    caches.CachePlan,
    editing.Cropped,
]


def record(kinds: dict[str, Kind]) -> dict[str, Any]:
    """What other packs depend on, as JSON reads it back."""
    out: dict[str, Any] = {}
    for name, kind in kinds.items():
        attributes: dict[str, Any] = {}
        for one in kind.attributes:
            attributes[one.name] = [one.form.one, "needed" if one.needed else "may be left out"]
        out[name] = {"version": kind.version, "sockets": list(kind.sockets), "attributes": attributes}
    return out


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a change from one record to another does to packs of others, without a higher version."""
    out: list[str] = []
    for kind, was in old.items():
        if kind not in new:
            out.append(f"the kind {kind} is gone")
            continue

        now = new[kind]
        if now["version"] < was["version"]:
            out.append(f"{kind}: its version fell")
        if now["version"] != was["version"]:
            continue

        if not set(was["sockets"]) <= set(now["sockets"]):
            out.append(f"{kind}: a socket left")
        for name, about in was["attributes"].items():
            if name not in now["attributes"]:
                out.append(f"{kind}: {name} is gone")
            elif now["attributes"][name] != about:
                out.append(f"{kind}: {name} was {', '.join(about)} and is {', '.join(now['attributes'][name])}")
        for name, (_, need) in now["attributes"].items():
            if name not in was["attributes"] and need == "needed":
                out.append(f"{kind}: {name} is needed from now on")
    return out


def table(kinds: dict[str, Kind]) -> str:
    """The table of the page: a row for each kind, followed by a row for each of its attributes."""
    rows = ["| socket | kind or attribute | type | meaning |", "| --- | --- | --- | --- |"]
    for name, kind in kinds.items():
        version = f"version {kind.version}" if kind.version > 1 else ""
        about = ", ".join(part for part in (kind.about, version) if part)
        rows.append(f"| {', '.join(kind.sockets)} | *{name}* | | {about} |")
        for one in kind.attributes:
            images = ", one for each image" if one.per_image else ""
            free = "" if one.needed else "; it may be left out"
            rows.append(f"| | `{one.name}` | {one.form.one}{images}{free} | {one.about} |")
    return "\n".join(rows)


def test_the_table_is_the_recorded_one():
    recorded, now = json.loads(GOLDEN.read_text(encoding="utf-8")), record(VALUES)
    assert breaks(recorded, now) == [], "packs of others depend on it: raise the version of the kind, and record it"
    assert recorded == now, "record it, see above"


def test_the_page_shows_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert figures.with_block(page, NAME, table(VALUES)) == page, "write it anew, see above"


def test_every_kind_is_that_of_a_class_with_its_version_and_attributes():
    assert [cls.kind for cls in CLASSES] == list(VALUES)
    for cls in CLASSES:
        about = VALUES[cls.kind]
        assert cls.fastar_version == about.version, cls

        own = {field.name: field for field in fields(cls)}
        for one in about.attributes:
            first = one.name.partition(".")[0]
            assert first in own or hasattr(cls, first), f"{cls}: {one.name}"
            if one.name not in own or cls in (host.loaded.Loaded, caches.CachePlan):
                continue
            field = own[one.name]
            assert one.needed == (field.default is MISSING and field.default_factory is MISSING), f"{cls}: {one.name}"


def test_an_attribute_that_the_table_does_not_list_is_not_taken_from_another_class():
    given = SimpleNamespace(kind="cache", fastar_version=1, preset="fast", values={}, removed=3)
    assert sockets.expect_own(given, caches.CachePlan, "cache", "LazyMAR Cache") == caches.CachePlan("fast", {})


def test_every_socket_of_the_nodes_is_in_the_table():
    nodes = json.loads(GOLDEN.with_name("schemas.json").read_text(encoding="utf-8"))
    types: set[str] = set()
    for about in nodes.values():
        for _, kinds, *_ in [*about["inputs"], *about["outputs"]]:
            types.update(kinds.split(","))

    described = {socket for kind in VALUES.values() for socket in kind.sockets}
    assert {one for one in types if one.startswith("FASTAR_")} == described


if __name__ == "__main__":
    now = record(VALUES)
    before = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    if broken := breaks(before, now):
        sys.exit("\n".join(["This would break packs of others; raise the version of the kind:", *broken]))
    GOLDEN.write_text(json.dumps(now, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(figures.with_block(page, NAME, table(VALUES)), encoding="utf-8")
