"""Import rules: importing has no side effects, packages import in one direction, and files import without cycles."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "lab", "model_loaders", "networks", "nodes", "reports", "runs", "samplers", "sweeps")


def sources() -> list[Path]:
    """Every module of the package, development tools included."""
    return sorted([*ROOT.glob("*.py"), *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))])


def name_of(path: Path) -> str:
    """Dotted name of a module below the package; of an ``__init__.py``, that of its package, "" for the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WATCHED = """
import importlib, importlib.util, json, sys
effects = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        effects.append(f"{event} {args[0]}")
    elif event.split(".")[0] in ("socket", "subprocess", "urllib", "shutil", "tempfile") and event != "socket.__new__":
        effects.append(event)
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.putenv", "os.system", "os.exec", "os.posix_spawn"):
        effects.append(f"{event} {args}")
sys.addaudithook(watch)
root, names = sys.argv[1], sys.argv[2].split(",")
before = set(sys.modules)
spec = importlib.util.spec_from_file_location("fastar_nodes", root + "/__init__.py", submodule_search_locations=[root])
module = importlib.util.module_from_spec(spec)
sys.modules["fastar_nodes"] = module
spec.loader.exec_module(module)
package = set(sys.modules) - before
assert not hasattr(module, "NODE_CLASS_MAPPINGS") and effects == []
module.UserError
import numpy, torch, PIL.Image, PIL.ImageDraw, PIL.ImageFont, safetensors.torch
effects.clear()
state = torch.random.get_rng_state()
before = set(sys.modules)
for name in names:
    importlib.import_module("fastar_nodes." + name)
print(json.dumps({
    "package": sorted(package), "all": sorted(set(sys.modules) - before), "effects": effects,
    "cuda": torch.cuda.is_initialized(), "grad": torch.is_grad_enabled(), "dtype": str(torch.get_default_dtype()),
    "random": bool((state == torch.random.get_rng_state()).all()),
}))
"""


def loaded() -> list[str]:
    """The modules that the measurement imports: all that need no ComfyUI, and the commands of the lab."""
    packages = (
        *("api", "pipeline", "cli", "model_loaders", "networks", "reports", "runs"),
        *("samplers", "sweeps", "lab.experiments", "lab.gpu", "lab.parity", "lab.sweeps", "lab.work"),
    )
    names = [name_of(path) for path in sources()]
    own = [name for name in names if any(within(name, package) for package in packages)]
    return [*own, "nodes", "lab.training.command"]


@pytest.fixture(scope="module")
def imported():
    """What a process saw that imports the package, then torch and the other packages of ComfyUI, then every module."""
    command = [sys.executable, "-B", "-c", WATCHED, str(ROOT), ",".join(loaded())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_has_no_side_effects(imported):
    assert imported["effects"] == []
    assert not imported["cuda"] and imported["grad"] and imported["dtype"] == "torch.float32" and imported["random"]


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when a module is imported: those outside functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def test_importing_the_pack_needs_no_private_module_of_torch():
    """Another version of torch may have moved it, and no node would be left."""
    private = re.compile(r"torch\.(\w+\.)*_[a-zA-Z]")
    found = []
    for path in sources():
        if path.relative_to(ROOT).parts[0] == "lab":
            continue
        for node in at_import(tree_of(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            found += [f"{path.name}: {name}" for name in names if private.match(name)]
    assert found == []


def foreign(names: list[str]) -> set[str]:
    """Of modules, the packages that belong neither to the standard library nor to FastAR."""
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"fastar_nodes"}


def test_importing_loads_nothing_before_it_is_used(imported):
    """What an import costs is the modules that it loads: a package
    that is not always needed is imported where it is used.
    """
    assert [name for name in imported["package"] if name.startswith("fastar_nodes.")] == []
    assert foreign(imported["package"]) == set()
    assert foreign(imported["all"]) <= {"numpy", "PIL", "safetensors", "torch"}


# Module or package: what of the package it may import. The longest matching entry applies; "" is the root package.
# errors.py and memory.py may be imported everywhere.
OURS = {
    "": {"api", "nodes"},
    "api": {"pipeline", "runs", "samplers", "model_loaders", "networks", "reports"},
    "__main__": {"cli"},
    "errors": set(),
    "memory": set(),
    "nodes": {"nodes", "sweeps", "runs", "samplers", "model_loaders", "networks", "reports"},
    "nodes.host": {"nodes.host", "networks", "reports"},
    "nodes.graph": {"nodes.host"},
    "nodes.vae": {"networks", "nodes.host", "nodes.schema", "runs.images"},
    "sweeps": {"sweeps", "runs", "samplers", "reports"},
    "runs": {"runs", "samplers", "model_loaders", "networks", "reports"},
    "samplers": {"samplers", "networks", "reports.record"},
    "reports": {"reports"},
    "model_loaders": {"model_loaders", "networks"},
    "model_loaders.files": {"model_loaders.files", "networks"},
    "model_loaders.catalogue": {"model_loaders.catalogue", "model_loaders.kinds", "model_loaders.files", "networks"},
    "networks": {"networks"},
    "pipeline": {"runs", "samplers", "model_loaders", "networks", "reports"},
    "cli": {"cli", "pipeline", "runs", "samplers", "model_loaders", "networks", "reports"},
    "lab": {*PACKAGES, "pipeline"},
}
# Within these packages, the other ones are excluded.
FOLDERS = ("samplers.mar", "samplers.tokens", "samplers.blocks", "samplers.nextstep")
APART = {folder: tuple(other for other in FOLDERS if other != folder) for folder in FOLDERS}
PICTURES = {"torch", "numpy", "PIL"}
# Third-party modules; the standard library is allowed everywhere.
OTHERS = {
    **dict.fromkeys(("", "api", "__main__", "errors", "memory"), set()),
    "pipeline": PICTURES,
    "nodes": {*PICTURES, "comfy_api"},
    "nodes.host": {
        *PICTURES,
        *"aiohttp comfy comfy_api comfy_execution comfy_extras folder_paths latent_preview server".split(),
    },
    "samplers": {"torch", "numpy"},
    "sweeps": PICTURES,
    "reports": PICTURES,
    "model_loaders": {"torch", "safetensors", "huggingface_hub", "filelock", "transformers", "tokenizers"},
    "networks": {"torch"},
    "runs": {"torch", "numpy"},
    "runs.images": PICTURES,
    "model_loaders.janus.squares": PICTURES,
    "model_loaders.nextstep.sources": PICTURES,
    "cli": {*PICTURES, "safetensors", "tqdm"},
    "lab": {*PICTURES, "safetensors", "tomli", "matplotlib"},
    "lab.sweeps": {*PICTURES, "tomli", "matplotlib"},
    "lab.docs.translate": {"fake_comfy", "test_schemas", "fastar_nodes"},  # the nodes without a ComfyUI
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def entry_of(name: str, table: dict) -> str:
    """The longest entry of a table that contains a module."""
    return max((entry for entry in table if within(name, entry)), key=len, default="")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, at any depth. Expressions, most of a tree, are left out: they hold no statement."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@cache
def parse(path: Path) -> tuple[set[str], set[str]]:
    """Absolute imports of a file, and modules of the package that it imports, at any level and in any function.

    ``TYPE_CHECKING`` is no exception: what is imported for types alone is a dependency of the reader.
    """
    package = path.relative_to(ROOT).parts[:-1]
    absolute, relative = set(), set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            absolute |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            absolute.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= len(package) + 1, f"{path} imports beyond the package"
            stem = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                relative.add(module(".".join(stem), alias.name))
    return absolute, relative


def module(stem: str, name: str) -> str:
    """The module that ``from stem import name`` loads."""
    whole = f"{stem}.{name}".lstrip(".")
    path = ROOT.joinpath(*whole.split("."))
    return whole if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() else stem


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_packages_import_in_one_direction(path):
    name = name_of(path)
    entry, (absolute, relative) = entry_of(name, OURS), parse(path)
    for other in absolute:
        top = other.split(".")[0]
        assert top != "fastar_nodes" or name == "lab.docs.translate", f"{name}: imports within the package are relative"
        assert top in sys.stdlib_module_names or top in OTHERS[entry_of(name, OTHERS)], f"{name} may not import {other}"
    apart = APART.get(entry_of(name, APART), ())
    for other in relative - {"errors", "memory"}:
        assert any(within(other, allowed) for allowed in OURS[entry]), f"{name} may not import {other}"
        assert not any(within(other, package) for package in apart), f"{name} may not import {other}"


def test_contributing_states_these_rules():
    """Its table of packages; of the rows that only name what they may import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    stated = {}
    for package, allowed in re.findall(r"^\| `([\w/.]+)` \|.*\| ([\w/., ]+) \|$", text, re.MULTILINE):
        name = package.removesuffix("/").removesuffix(".py").replace("/", ".").replace("__init__", "")
        if name in OURS and allowed != "everything":
            stated[name] = set() if allowed == "nothing of the package" else set(allowed.replace("/", ".").split(", "))

    assert len(stated) > 10
    for name, others in stated.items():
        assert others == {other for other in OURS[name] if other != name}, name


def test_nothing_that_ships_names_a_module_of_the_lab():
    """An installed pack does not contain it. Sentences may name its command line."""
    for path in sources():
        name = name_of(path)
        if not within(name, "lab"):
            texts = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
            assert not [t for t in texts if isinstance(t, str) and "lab." in t and " " not in t], name


def test_the_lab_takes_public_names():
    """No name with an underscore of a module of ours. Of torch, one module has no public name."""
    allowed = {"torch.utils._python_dispatch"}
    found = []
    for path in sources():
        if not within(name_of(path), "lab"):
            continue
        modules = set()
        for node in statements(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
                private = any(re.match(r"(.*\.)?_[a-z]", name) for name in names)
                if private and node.module not in allowed:
                    found.append(f"{name_of(path)}: from {node.module} import {', '.join(names[1:])}")
                if node.level:
                    modules |= {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and re.match(r"_(?!replace$)[a-zA-Z]", node.attr):
                if isinstance(node.value, ast.Name) and node.value.id in modules:
                    found.append(f"{name_of(path)}: {ast.unparse(node)}")
    assert found == []


def graph() -> dict[str, set[str]]:
    """The modules that each module imports, itself left out."""
    return {name_of(path): parse(path)[1] - {name_of(path)} for path in sources()}


def test_files_import_without_cycles():
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names them
