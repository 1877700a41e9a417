"""The pack twice in custom_nodes: an unpacked archive beside the folder of git or of the Manager."""

import re
from collections.abc import Iterator

import pytest
from comfy_host import PACK, ROOT, Comfy, Missing, graph

SECOND = f"{PACK}-main"


class TwoCopies(Comfy):
    def _copy_example(self) -> None:
        super()._copy_example()
        (self.base / "custom_nodes" / SECOND).symlink_to(ROOT, target_is_directory=True)


@pytest.fixture(scope="module")
def twice() -> Iterator[Comfy]:
    try:
        server = TwoCopies()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


def test_the_server_starts_and_one_sentence_names_both_folders(twice):
    (line,) = [line for line in twice.log.splitlines() if "FastAR is installed twice" in line]
    used, unused = re.search(r"twice: ComfyUI uses (\S+) and ignores (\S+);", line).groups()
    folder = twice.base / "custom_nodes"
    assert {used, unused} == {str(folder / PACK), str(folder / SECOND)}
    assert "Traceback" not in twice.log.partition("Import times for custom nodes")[0]
    assert re.search(rf"\(IMPORT FAILED\): {re.escape(unused)}$", twice.log, re.MULTILINE)


def test_nodes_scripts_and_the_route_are_those_of_one_copy(twice):
    scripts = [path for path in twice.get("/extensions") if f"/{PACK}" in path]
    names = [path.rsplit("/", 1)[1] for path in scripts]
    assert sorted(names) == sorted(path.name for path in (ROOT / "web" / "js").glob("*.js"))

    modules = {about["python_module"] for name, about in twice.get("/object_info").items() if name.startswith("FastAR")}
    (module,) = modules
    assert all(path.startswith(f"/extensions/{module.removeprefix('custom_nodes.')}/") for path in scripts)

    asked = {"node": "FastARMARSampler", "preset": "recommended"}
    assert twice.post("/fastar/fill", asked)["values"]["steps"] > 0


def test_an_image_is_drawn(twice):
    assert twice.run(graph())["8"]["images"]


def test_templates_of_both_folders_open(twice):
    """ComfyUI lists them by folder, whether the pack in it was loaded or not."""
    for folder, names in twice.get("/workflow_templates").items():
        if folder.startswith(PACK):
            assert twice.bytes(f"/api/workflow_templates/{folder}/{names[0].replace(' ', '%20')}.json")
