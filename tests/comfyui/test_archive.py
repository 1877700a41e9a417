"""The shipped archive, unpacked into a clean ComfyUI, as a new user has it."""

import zipfile
from collections.abc import Iterator

import pytest
from comfy_host import PACK, Comfy, Missing, graph
from fastar_nodes.lab.release import release


class FromArchive(Comfy):
    def _copy_example(self) -> None:
        super()._copy_example()
        (self.base / "custom_nodes" / PACK).unlink()
        release.write_archive(release.shipped(), self.base / "pack.zip")
        with zipfile.ZipFile(self.base / "pack.zip") as archive:
            archive.extractall(self.base / "custom_nodes" / PACK)


@pytest.fixture(scope="module")
def installed() -> Iterator[Comfy]:
    try:
        server = FromArchive()
    except Missing as problem:
        pytest.skip(f"NOT TESTED IN COMFYUI: {problem}")
    with server:
        yield server


def test_the_first_template_runs(installed):
    assert not (installed.base / "custom_nodes" / PACK / "tests").exists()
    assert installed.run(graph())["8"]["images"]
