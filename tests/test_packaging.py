"""The package metadata, the shipped archive, and the files that publish it."""

import argparse
import ast
import fnmatch
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml  # a requirement of huggingface-hub
from fastar_nodes import errors
from fastar_nodes.lab.release import release
from PIL import Image
from safetensors import safe_open

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a requirement of pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("cli", "model_loaders", "networks", "nodes", "reports", "runs", "samplers", "sweeps")


def test_every_package_is_listed():
    found = {"fastar_nodes"}
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path
            found.add("fastar_nodes." + ".".join(path.parent.relative_to(ROOT).parts))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_data_file_is_installed():
    patterns = PROJECT["tool"]["setuptools"]["package-data"].items()
    globs = ["/".join([*package.split(".")[1:], glob]) for package, own in patterns for glob in own]
    installed = [glob.replace("**/", "") for glob in globs]
    assert "py.typed" in installed, "type checkers read the annotations of an installed package only with it"
    for folder in (*PACKAGES, "demo", "subgraphs", "web", "workflows"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc") or path.name.startswith("."):
                continue
            name = path.relative_to(ROOT).as_posix()
            assert any(fnmatch.fnmatch(name, glob) for glob in installed), name


def test_version_and_dependencies():
    project = PROJECT["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["dependencies"] == ["huggingface-hub>=0.26"], "what ComfyUI brings is never installed again"
    assert (ROOT / "requirements.txt").read_text(encoding="utf-8").split() == project["dependencies"]


@pytest.mark.parametrize("name", ["fastar", "a b"])
@pytest.mark.fast_cases("a b")
def test_tests_run_in_a_folder_of_any_name(name, tmp_path):
    """pytest imports ``__init__.py`` as a module of its own where the folder's name is no identifier."""
    folder, stub = tmp_path / name, tmp_path / "stub"
    for file in (
        "__init__.py",
        "api.py",
        "errors.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/lib/checkout.py",
        "tests/lib/timeouts.py",
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, folder / file)
    test = "import fastar_nodes\ndef test():\n    assert issubclass(fastar_nodes.UserError, ValueError)\n"
    (folder / "tests" / "test_one.py").write_text(test)
    stub.mkdir()  # torch takes seconds to import
    (stub / "torch.py").write_text("get_num_threads = lambda: 1\nset_num_threads = print\n")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(stub)}
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


BARE = """
import sys
sys.path.insert(0, sys.argv[1])
import fastar_nodes
assert fastar_nodes.UserError.__name__ == "UserError"
assert "load_mar" in dir(fastar_nodes) and not hasattr(fastar_nodes, "NODE_CLASS_MAPPINGS")
for name in ("load_mar", "SAMPLERS", "fasthybrid"):
    try:
        getattr(fastar_nodes, name)
    except ImportError as problem:
        print(problem)
"""


def test_without_any_package_one_sentence_says_what_to_install(tmp_path):
    """A wheel that was installed by pip alone: Python without site-packages."""
    folder = tmp_path / "fastar_nodes"
    folder.mkdir()
    for file in ("__init__.py", "__main__.py", "api.py", "errors.py"):
        shutil.copyfile(ROOT / file, folder / file)
    names = "torch numpy pillow safetensors huggingface-hub tqdm"
    sentence = f"FastAR needs Python packages that are not installed; run: python -m pip install {names}.\n"

    def python(*arguments):
        command = [sys.executable, "-S", "-B", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    for arguments in (("compare",), ()):
        done = python("-m", "fastar_nodes", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
    done = python("-c", BARE, str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, sentence * 3, "")


@pytest.mark.parametrize(
    ("module", "package"), [("numpy", "numpy"), ("PIL", "pillow"), ("huggingface_hub", "huggingface-hub")]
)
def test_one_missing_package_is_named_alone(monkeypatch, module, package):
    assert errors.missing_packages() == "", "the tests run with all of them"
    found = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == module else found(name))
    assert errors.missing_packages().endswith(f"; run: python -m pip install {package}.")


def test_what_every_entry_point_needs_is_declared():
    """FastAR's own dependency and what the extra *standalone* names;
    tqdm comes with huggingface-hub, tokenizers is for prompts.
    """
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["standalone"]]
    names = {re.split("[>=]", requirement)[0] for requirement in declared}
    assert {*errors._NEEDED.values()} - {"tqdm"} == names - {"tokenizers"}


ALONE = """
import asyncio, importlib, importlib.util, json, sys
from pathlib import Path
root, fakes = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, fakes)
# An editable installation of this repository would supply the missing modules.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in str(getattr(finder, "__module__", ""))]
import fake_comfy
fake_comfy.install()
folders = sys.modules["folder_paths"]
folders.add_model_folder_path = lambda kind, *_, **__: folders.folder_names_and_paths.setdefault(kind, ([], set()))
spec = importlib.util.spec_from_file_location(
    "fastar_nodes", root / "__init__.py", submodule_search_locations=[str(root)]
)
package = importlib.util.module_from_spec(spec)
sys.modules["fastar_nodes"] = package
spec.loader.exec_module(package)
modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")]
modules = [name.removesuffix(".__init__") for name in modules if name not in ("__init__", "__main__")]
for name in modules:
    assert Path(importlib.import_module(f"fastar_nodes.{name}").__file__).is_relative_to(root), name
nodes = asyncio.run(asyncio.run(package.comfy_entrypoint()).get_node_list())
from fastar_nodes.cli.main import main
few = "--set steps=2 --set diffusion_steps=4"
compared = main(f"compare --samplers mar,fasthybrid {few} --label cat --device cpu --out out.png".split())
print(json.dumps({
    "modules": modules,
    "nodes": [node.define_schema().node_id for node in nodes],
    "compared": compared,
    "codes": [main([name, "x"]) for name in ("table", "train-demo", "sweep")],
}))
"""


@pytest.fixture(scope="module")
def shipped():
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("NOT TESTED: the shipped archive needs a git checkout")
    return release.shipped(ROOT)


def test_the_archive_holds_no_development_files(shipped):
    names = {path.as_posix() for path in shipped}
    assert {
        "__init__.py",
        "py.typed",
        "docs/python.md",
        "pyproject.toml",
        "demo/checkpoints/mar.safetensors",
        "web/docs/FastARCompare.md",
    } <= names
    for word in "lab/ tests/ .github/ CONTRIBUTING Makefile judge train".split():
        assert not [name for name in names if word in name], word
    size, lines = release.size(shipped)
    print(f"shipped: {len(names)} files, {size / 1e6:.1f} MB, {lines} lines of Python")
    assert size < release.MOST_BYTES
    assert release.size([name for name in shipped if ".safetensors" in str(name)])[0] < release.MOST_CHECKPOINT_BYTES


def test_links_and_bytecode_are_found_in_an_archive(tmp_path):
    """Also links to folders, which git lists as one name."""
    (tmp_path / "web").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name in ("__init__.py", "__pycache__/api.pyc", ".comfyignore"):
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "web", target_is_directory=True)
    (tmp_path / "linked.py").symlink_to(tmp_path / "__init__.py")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, capture_output=True)

    found = release.archive_problems(release.shipped(tmp_path), tmp_path)
    assert [problem.split(";")[0] for problem in found] == [
        "archive: __pycache__/api.pyc is bytecode",
        "archive: linked is a link",
        "archive: linked.py is a link",
    ]
    assert release.archive_problems([Path("tests/a.py")], tmp_path)[0].startswith(
        "archive: tests/a.py is a development"
    )


def test_comfyui_has_one_way_in():
    """One web folder, stated in one place, and no dictionary of nodes, because of which the entry point is ignored."""
    module = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    assigned = {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    functions = {node.name for node in ast.walk(module) if isinstance(node, ast.AsyncFunctionDef)}
    assert "WEB_DIRECTORY" in assigned and functions == {"comfy_entrypoint"}
    assert not assigned & {"NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "EXTENSION_WEB_DIRS"}
    assert "web" not in PROJECT["tool"]["comfy"]
    assert [path for path in ("v2", "js", "dist") if (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_archive_works_alone(shipped, tmp_path):
    archive, folder = tmp_path / "pack.zip", tmp_path / "fastar-nodes"
    release.write_archive(shipped, archive)
    with zipfile.ZipFile(archive) as f:
        f.extractall(folder)
    command = [sys.executable, "-B", "-c", ALONE, str(folder), str(ROOT / "tests" / "lib")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["modules"]) > 50 and len(found["nodes"]) == len(set(found["nodes"])) >= 20
    assert {f"{name}.md" for name in found["nodes"]} == {p.name for p in (folder / "web" / "docs").glob("*.md")}
    assert found["compared"] == 0 and (tmp_path / "out.png").is_file()
    assert found["codes"] == [2, 2, 2]
    sentences = [line for line in done.stderr.splitlines() if "checkout" in line]
    fields = [line.split(":")[0] for line in sentences]
    assert fields == ["command", "command", "command"], "of table, train-demo and sweep"


def test_the_changelog_agrees_with_the_version():
    version, changelog = PROJECT["project"]["version"], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = release.version_problems(version, changelog, None)
    assert not problems or len(problems) == 1 and problems[0].endswith(f"[{version}] has no date (YYYY-MM-DD)")


def test_the_release_check_names_what_is_open(capsys):
    dated = "# Changelog\n\n## [1.2.3] - 2026-01-31\n"
    assert release.version_problems("1.2.3", dated, "v1.2.3") == []
    assert "tag: v1.2 is not v1.2.3" in release.version_problems("1.2.3", dated, "v1.2")[0]
    assert "first entry is not [1.2.4]" in release.version_problems("1.2.4", dated, None)[0]
    assert "no date" in release.version_problems("1.2.3", dated.replace("2026-01-31", "unreleased"), None)[0]
    empty = {"project": {}, "tool": {"comfy": {"PublisherId": ""}}}
    assert len(release.owner_fields(empty, "")) == 5
    address = "https://raw.githubusercontent.com/someone/pack/HEAD/docs/"
    for repository in ("https://github.com/someone/pack", "https://github.com/someone/pack.git"):
        comfy = {"PublisherId": "x", "Icon": f"{address}icon.png", "Banner": f"{address}banner.png"}
        filled = {"project": {"urls": {"Repository": repository}}, "tool": {"comfy": comfy}}
        readme = f"git clone --depth 1 {repository} fastar-nodes"
        assert release.owner_fields(filled, readme) == []
        (clone,) = release.owner_fields(filled, "git clone ADDRESS")
        assert re.fullmatch(rf"README.md:\d+ {readme}", clone)
        comfy["Icon"] = "docs/icon.png"
        (icon,) = release.owner_fields(filled, readme)
        assert re.fullmatch(rf"pyproject.toml:\d+ \[tool.comfy\] Icon: {address}icon.png", icon)


def test_only_the_owner_of_the_repository_stands_between_this_checkout_and_a_release(shipped, capsys):
    """And rows of new presets in docs/full_size.md, which one makes for a release."""
    release.run(argparse.Namespace(tag=None, archive=None))
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("open: ")]
    owners = r"pyproject.toml:\d+ \[(project.urls|tool.comfy)\]|README.md:\d+ git clone|CHANGELOG.md:\d+ .* has no date"
    others = re.compile(f"open: ({owners}|docs/full_size.md: its table of presets lacks)")
    assert [line for line in found if not others.match(line)] == []


def test_the_icon_is_what_the_registry_accepts():
    with Image.open(ROOT / release.ICON) as icon:
        assert icon.format == "PNG" and icon.width == icon.height <= 400
        assert len(icon.convert("RGB").getcolors(1 << 16)) > 2, "blank"


def test_the_banner_is_what_the_registry_accepts():
    with Image.open(ROOT / release.BANNER) as banner:
        assert banner.format == "PNG" and banner.width * 9 == banner.height * 21


def test_workflows_cover_the_supported_versions():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    versions = [c.split()[-1] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == versions and {os.split("-")[0] for os in matrix["os"]} == {"ubuntu", "windows", "macos"}
    host = PROJECT["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    versions = [case["version"] for case in jobs["comfyui"]["strategy"]["matrix"]["include"]]
    assert {f"v{host}", "master"} <= set(versions)
    oldest = " ".join(step.get("run", "") for step in jobs["oldest"]["steps"])
    for requirement in PROJECT["project"]["optional-dependencies"]["standalone"]:
        assert ">=" not in requirement or f'"{requirement.replace(">=", "==")}.0"' in oldest, requirement


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "type"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])


def test_the_model_card_states_every_demo_file_and_its_size():
    card = (ROOT / "demo" / "README.md").read_text(encoding="utf-8")
    rows = [
        line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and "safetensors" in line
    ]
    stated = {row[0]: (int(row[3].replace(",", "")), float(row[4])) for row in rows}

    found = {}
    for path in (ROOT / "demo" / "checkpoints").iterdir():
        with safe_open(path, "np") as file:
            weights = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())
        found[path.name] = (weights, round(path.stat().st_size / 1e6, 1))
    assert stated == found
    assert (ROOT / "demo" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
