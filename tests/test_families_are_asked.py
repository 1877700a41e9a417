"""Rooms outside the families ask the record of a family: none compares its name, its class or its decoder's kind."""

import ast
from pathlib import Path

import pytest
from fastar_nodes.runs.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cli", "nodes", "reports", "runs", "sweeps")
# Where families may be named: their records, and the registry, which lists samplers for them.
OF_FAMILIES = ("runs/families", "runs/registry.py", "runs/memory")
# Classes of models, which are families' own.
MODELS = {"MARModel", "HybridModel", "TokenModel", "JanusModel", "BlockModel"}
NAMES = {*FAMILIES, *(family.files for family in FAMILIES.values())}


def sources() -> list[Path]:
    found = [ROOT / "pipeline.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    return [path for path in found if not path.relative_to(ROOT).as_posix().startswith(OF_FAMILIES)]


def named(node: ast.AST) -> bool:
    """Whether an expression is the name of a family or of the kind of its files, as text or as a constant."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(named, node.elts))
    if isinstance(node, ast.Constant):
        return node.value in NAMES
    text = ast.unparse(node).rpartition(".")[2]
    return text.isupper() and text.lower() in FAMILIES


def questions(tree: ast.AST) -> list[str]:
    """Expressions that recognise a family in place of asking it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            decoders = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "decoder"]
            is_option = any(ast.unparse(side) in ("AUTO", "None") for side in sides)  # of a user's choice of a decoder
            if any(map(named, sides)) or decoders and not is_option:
                found.append(ast.unparse(node))
            elif any(ast.unparse(side).endswith("entry.id") for side in node.comparators):
                found.append(ast.unparse(node))  # a piece of a catalogue id
        elif isinstance(node, ast.Subscript) and ast.unparse(node.slice).endswith("family.decoder"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            if MODELS & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_family_is_recognised(path):
    assert questions(ast.parse(path.read_text(encoding="utf-8"))) == []
