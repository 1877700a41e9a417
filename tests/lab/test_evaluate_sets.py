"""What others measure: the images of a cell in one file for the ADM evaluator, and CLIP's score of prompts."""

import json

import made_sweeps
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.clip import Clip
from fastar_nodes.lab.sweeps.joined import write_joined
from fastar_nodes.lab.sweeps.measures import Means, evaluate
from fastar_nodes.lab.sweeps.store import Store

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


def test_the_shards_of_every_cell_are_one_file(tmp_path):
    store = made_sweeps.write(tmp_path / "sweep", 20, finished=8)
    written = write_joined(store, tmp_path / "joined")
    assert [path.stem for path in written] == [cell.id for cell in store.cells()]
    for cell, path in zip(store.cells(), written, strict=True):
        with np.load(path) as file:
            assert file.files == ["arr_0"] and file["arr_0"].dtype == np.uint8
            parts = [store.pictures(cell, shard) for shard in store.shards(cell)]
            np.testing.assert_array_equal(file["arr_0"], np.concatenate(parts))
    assert sum(len(store.shards(cell)) for cell in store.cells()) > len(written), "several shards a cell"
    assert not list((tmp_path / "joined").glob("*.part"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"^npz: mar-0.npz cannot be written \("):
        write_joined(made_sweeps.write(tmp_path / "sweep", 8), tmp_path / "taken")


@pytest.fixture(scope="module")
def small_clip(tmp_path_factory):
    """A folder with a random CLIP of few numbers, as transformers writes it."""
    folder = tmp_path_factory.mktemp("clip")
    words = ["<|startoftext|>", "<|endoftext|>", *(f"{letter}</w>" for letter in "abc"), *"abc"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt")).save_pretrained(folder)

    about = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**about, "vocab_size": len(words), "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**about, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    transformers.CLIPImageProcessor(size=size, crop_size=size).save_pretrained(folder)
    return folder


def test_the_score_is_the_cosine_of_an_image_and_its_prompt(small_clip):
    """By the parts of the model, one image after the other; 0 where the cosine is negative."""
    pictures = made_sweeps.pictures(0, 12, 5.0)
    prompts = np.array(["a b", "c", "a a c b"] * 4)
    found = Clip(str(small_clip), CPU).scores(pictures, prompts)

    model = transformers.CLIPModel.from_pretrained(small_clip).eval()
    tokenizer = transformers.CLIPTokenizerFast.from_pretrained(small_clip)
    processor = transformers.CLIPImageProcessor.from_pretrained(small_clip)
    cosines = []
    for picture, prompt in zip(pictures, prompts, strict=True):
        seen = model.vision_model(processor([picture], return_tensors="pt")["pixel_values"]).pooler_output
        read = model.text_model(**tokenizer([str(prompt)], return_tensors="pt")).pooler_output
        cosines.append(F.cosine_similarity(model.visual_projection(seen), model.text_projection(read)).item())
    assert min(cosines) < 0 < max(cosines), "both signs must occur for this to say anything"
    np.testing.assert_allclose(found, [100 * max(0, cosine) for cosine in cosines], atol=1e-3)


def test_prompts_are_measured_and_classes_are_not(small_clip, tmp_path, monkeypatch):
    store = made_sweeps.write(tmp_path / "sweep", 16)
    clip = Clip(str(small_clip), CPU)
    with pytest.raises(
        UserError, match="nothing can be measured: its images were generated from classes, not from prompts"
    ):
        evaluate(store, ["clip"], Means(clip=clip, resamples=10))

    prompts = np.array(["a b", "c"] * (made_sweeps.BATCH // 2))
    monkeypatch.setattr(Store, "labels", lambda self, cell, shard: prompts[: shard.count])
    plain, *others = evaluate(store, ["clip"], Means(clip=clip, resamples=10))
    wanted = np.concatenate(
        [clip.scores(store.pictures(store.cells()[0], s), prompts) for s in store.shards(store.cells()[0])]
    )
    assert plain.value == pytest.approx(wanted.mean()) and plain.low <= plain.value <= plain.high
    assert plain.difference == (None, None, None)
    assert all(other.difference[0] == pytest.approx(other.value - plain.value) for other in others)


def test_a_model_that_is_not_here_is_said(tmp_path):
    with pytest.raises(
        UserError, match=r"^clip: .*nowhere is not on this machine or cannot be read .*; run `hf download"
    ):
        Clip(str(tmp_path / "nowhere"), CPU)
