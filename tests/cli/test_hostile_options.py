"""Options that no run can use are refused before it starts, and an interrupted write leaves nothing half-written."""

from pathlib import Path

import pytest
from fastar_nodes.cli.options import choose_device, output, save, whole
from fastar_nodes.errors import UserError


@pytest.mark.parametrize("name", ["meta", "nosuch", "cuda:99", "", "cpu\0", "x" * 10_000, "9" * 5000])
def test_devices_that_compute_nothing(name: str) -> None:
    with pytest.raises(UserError, match="^device: ") as error:
        choose_device(name)
    assert "there is cpu" in str(error.value) and len(str(error.value)) <= 400


@pytest.mark.parametrize("name", ["a\0b.png", "x" * 300 + ".png"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="^out: "):
        output(tmp_path / name, "out", (".png",))


@pytest.mark.parametrize("text", ["x" * 10_000, "9" * 5000, "[]", "nan", "1e3"])
def test_long_values_are_shortened(text: str) -> None:
    with pytest.raises(UserError, match="^seed: ") as error:
        whole(text, "seed", 0, 10)
    assert len(str(error.value)) <= 400


@pytest.mark.parametrize("text", ["x", "-5", "1000000", ""])
def test_threads_that_no_machine_has(cli, sentence, text: str) -> None:
    assert sentence(cli("sweep", "none.json", "--threads", text)).startswith("threads: ")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    save(path, lambda part: part.write_text("old"))

    def fails(part: Path) -> None:
        part.write_text("ne")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        save(path, fails)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x.json"]
    save(path, lambda part: part.write_text("new"))
    assert path.read_text() == "new"
