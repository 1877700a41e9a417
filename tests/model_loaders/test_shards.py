"""Which files of a folder hold the weights of a choice; a file never brings the weights of another model with it."""

import json
import os
import shutil
from pathlib import Path

import janus_files
import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.files.checkpoint import read_json
from fastar_nodes.model_loaders.files.shards import weight_files
from fastar_nodes.model_loaders.janus.loader import load_janus, load_janus_vq
from safetensors.torch import save_file


def files(folder: Path, *names: str) -> Path:
    """Empty files of these names."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def chosen(path: Path) -> list[str]:
    return [file.name for file in weight_files(path, "checkpoint", "a Janus")]


def refused(path: Path, *words: str) -> str:
    with pytest.raises(UserError) as error:
        chosen(path)
    text = str(error.value)
    assert text.startswith("checkpoint: ") and all(word in text for word in words), text
    return text


TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FOUR = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
BIN = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize("shard", TWO)
def test_a_shard_stands_for_its_set(tmp_path: Path, shard: str) -> None:
    folder = files(tmp_path, *TWO, *FOUR, *BIN, "model.safetensors", "other-00001-of-00002.safetensors")
    assert chosen(folder / shard) == TWO
    assert chosen(folder / FOUR[2]) == FOUR and chosen(folder / BIN[0]) == BIN
    assert chosen(folder / "model.safetensors") == ["model.safetensors"]
    refused(folder / "other-00001-of-00002.safetensors", "1 of 2 shards", "(other-00002-of-00002.safetensors)")


def test_names_that_only_look_like_shards(tmp_path: Path) -> None:
    for name in ("best-of-3.safetensors", "x-5-of-3.pt", "x-0-of-0.pt", "x-1-of-999999.pt"):
        assert chosen(files(tmp_path, name) / name) == [name]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (TWO, TWO),
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin", *BIN], ["model.safetensors"]),
        ([*TWO, *BIN, "pytorch_model.bin"], TWO),
        (BIN, BIN),
        (
            ["janus-1-of-2.safetensors", "janus-2-of-2.safetensors"],
            ["janus-1-of-2.safetensors", "janus-2-of-2.safetensors"],
        ),
    ],
)
def test_a_folder_of_one_model(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    assert chosen(files(tmp_path, *names)) == expected


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([*TWO, *FOUR], ("model-*-of-00002.safetensors, model-*-of-00004.safetensors",)),
        ([*TWO, *FOUR[:2]], ("model-*-of-00002.safetensors, model-*-of-00004.safetensors",)),
        ([*TWO, "model.safetensors"], ("model-*-of-00002.safetensors, model.safetensors",)),
    ],
)
def test_a_folder_of_several_models_is_refused_and_both_remedies_work(tmp_path: Path, names, said) -> None:
    folder = files(tmp_path / "both", *names)
    refused(
        folder,
        "both holds the weights of several models",
        *said,
        "choose a file of one model",
        "folders of their own",
    )
    assert chosen(folder / TWO[0]) == TWO
    others = files(tmp_path / "others")
    for name in set(names) - {*TWO}:
        shutil.move(folder / name, others / name)
    assert chosen(folder) == TWO


def index(folder: Path, *names: str, file: str = "model.safetensors.index.json") -> Path:
    (folder / file).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
    return folder / file


def test_an_index_names_the_set(tmp_path: Path) -> None:
    folder = files(tmp_path, *TWO, *FOUR)
    path = index(folder, *FOUR, *FOUR)
    assert chosen(folder) == FOUR and chosen(path) == FOUR
    other = index(folder, *TWO, file="model.fp16.safetensors.index.json")
    assert chosen(other) == TWO and chosen(folder) == FOUR
    index(folder, *(name.replace("model", "gone") for name in TWO))
    refused(folder, "several models")
    refused(path, "0 of 2 shards", "gone-00001-of-00002.safetensors")
    files(folder, "model.safetensors")
    index(folder, *TWO)
    refused(folder, "several models")  # the index does not say that the single file is another model's


@pytest.mark.parametrize("names", [(), ("../x.safetensors",), ("/etc/passwd",), ("a/b",)])
def test_an_index_that_leads_out_of_its_folder(tmp_path: Path, names: tuple[str, ...]) -> None:
    refused(index(files(tmp_path, *TWO), *names), "must name weight files in the same folder and nothing else")


def test_what_is_missing(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "there is no file or folder")
    refused(files(tmp_path / "empty", "config.json"), "does not hold model.safetensors, ", "nor the shards (parts) of")
    others = files(tmp_path / "others", "janus.safetensors", "x.pth")
    refused(others, "its only weight files are janus.safetensors, x.pth; choose a folder or file with a Janus")
    assert chosen(others / "x.pth") == ["x.pth"]
    refused(files(tmp_path / "some", *FOUR[1:3]), "2 of 4 shards", FOUR[0], FOUR[3])


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    folder = files(tmp_path, TWO[0])
    (folder / TWO[1]).symlink_to(folder / TWO[1])  # to itself
    refused(folder, f"{TWO[1]} in {folder} is a broken link; put the file itself into this folder")
    refused(folder / TWO[0], "a broken link")
    (folder / TWO[1]).unlink()
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    (folder / TWO[1]).symlink_to(folder / "a")
    refused(folder, "a broken link")
    (folder / TWO[1]).unlink()
    files(folder, TWO[1])
    assert chosen(folder) == TWO


def test_a_configuration_that_is_a_loop_is_not_taken_for_none(tmp_path: Path) -> None:
    folder = shutil.copytree(janus_files.FOLDER / "original", tmp_path / "x")
    load_janus(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(UserError, match=r"config.json in .* is a broken link"):
        load_janus(folder)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "..\\x.safetensors", "C:x.safetensors", "config.json", "a\0.safetensors"]
)
def test_an_index_that_names_no_weight_file(tmp_path: Path, name: str) -> None:
    """None of these is a missing shard, a link, or the folder itself."""
    refused(index(files(tmp_path, *TWO), name), "must name weight files in the same folder and nothing else")
    assert chosen(index(tmp_path, *TWO)) == [*TWO]


def test_a_configuration_with_a_byte_order_mark_and_one_that_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"heads": 2}')
    assert read_json(tmp_path / "config.json", "checkpoint") == {"heads": 2}
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.json")
        with pytest.raises(UserError, match="pipe.json in .* cannot be read .it is not a regular file.; get the file"):
            read_json(tmp_path / "pipe.json", "checkpoint")


def test_the_chosen_janus_is_loaded(tmp_path: Path) -> None:
    """A Janus of width 128 in two shards, and one of width 64 in a file, in one folder."""
    folder = shutil.copytree(janus_files.FOLDER / "sharded", tmp_path / "x")
    shutil.copy(janus_files.FOLDER / "original" / "model.safetensors", folder)
    shard = folder / TWO[1]
    assert load_janus(shard).net.config.dim == 128 and load_janus_vq(shard).net.config.codes > 0
    shutil.copy(janus_files.FOLDER / "original" / "config.json", folder)
    with pytest.raises(
        UserError, match="hidden_size = 64 in its configuration, but its weights have 128; replace the configuration"
    ):
        load_janus(shard)
    shutil.copy(janus_files.FOLDER / "sharded" / "config.json", folder)
    assert load_janus(shard).net.config.dim == 128


def test_weights_that_two_shards_hold(tmp_path: Path) -> None:
    for name in TWO:
        save_file({"gen_head.vision_head.weight": torch.ones(2, 2)}, tmp_path / name)
    with pytest.raises(UserError, match="gen_head.vision_head.weight, but another shard holds the same weights"):
        load_janus(tmp_path)
