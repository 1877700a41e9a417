"""Condition nodes: labels, prompts, images as codes."""

import itertools
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_comfy
import pytest
import torch
from counting import statements
from fake_comfy import Interrupted, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.networks.hybrid import UNCONDITIONAL
from fastar_nodes.nodes import conditioning, host, running, samplers, sharing
from fastar_nodes.nodes import graph as graph_of_nodes
from fastar_nodes.nodes.host.loaded import Loaded, ModelCache
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.tar import TarPromptSettings, tar_prompt
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from qwen_reference import tiny_tar
from tar_files import TA_TOK, tiny_ta_tok
from tiny import TEXT_SIZE, a_drawer, a_gpt, a_mar, a_prompt, dropped, sample
from tiny_files import READER, save


def label(labels: str, **changes):
    node = conditioning.ClassLabel
    return node.execute(**dropped(node, labels=labels, **changes)).result[0]


def test_labels_by_name_id_and_menu():
    own = {"label_set": "picture-book"}
    assert label("Cat, 0", images_per_label=2, **own).labels == (9, 9, 0, 0)
    assert label("", add_label="boat", **own).names == ("boat",)
    assert label("cat", add_label="boat", **own).labels == (9, 7)
    for field, changes in (
        ("add_label", {"add_label": "goldfish"}),
        ("add_label", {"add_label": "boats"}),
        ("add_label", {"add_label": 3}),
        ("labels", {"labels": "cat,cat", "images_per_label": 129}),
        ("labels", {"labels": "tabby"}),
    ):
        with pytest.raises(UserError, match=f"^{field}: "):
            label(**{"labels": "cat", **own, **changes})


def test_labels_take_the_label_set_of_the_model():
    assert running.as_labels(label("cat, 3"), "picture-book").labels == (9, 3)
    tabby = running.as_labels(label("tabby", images_per_label=2), "imagenet-1k")
    assert tabby.labels == (281, 281) and tabby.label_set == "imagenet-1k"
    assert running.as_labels(label("7"), "").labels == (7,)
    for condition in (label("tabby"), label("cat", add_label="goldfish")):
        with pytest.raises(UserError, match="^condition: "):
            running.as_labels(condition, "picture-book")
    model = a_mar(label_set="picture-book")
    samples, _ = sample(samplers.MARSampler, model=model)
    named, _ = sample(samplers.MARSampler, model=model, condition=label("mountains, flower"))
    assert torch.equal(samples, named)


def test_unknown_labels_are_named_before_the_run():
    check = conditioning.ClassLabel.validate_inputs
    assert check("cat, 281\ntabby") is True and check("") is True and check(None) is True
    words = check("catt, boat, golden retriver, 1000")
    assert "cat (the demo)" in words and "golden retriever (imagenet-1k)" in words and "'1000'" in words
    assert "boat'" not in words and "labels:" not in words
    words = check("word1, word2, word3, word4, word5")
    assert all(f"'word{i}'" in words for i in (1, 2, 3)) and "'word4'" not in words and "2 more" in words


def test_before_a_run_too_only_names_that_the_connected_models_know_are_suggested(monkeypatch):
    """ComfyUI passes no graph to validate_inputs, only the id of the node; its server passes the graph to a handler."""
    host.server.watch_prompts(lambda request: None)
    keep = fake_comfy.state.prompt_handlers[-1]

    def checked(text: str, checkpoint: str, label_set: Any = "auto", node: str = "3", add_label: Any = "none") -> str:
        graph = {
            "1": {"class_type": "FastARLoadMAR", "inputs": {"checkpoint": checkpoint}},
            "2": {"class_type": "FastARMARSampler", "inputs": {"model": ["1", 0], "condition": ["3", 0]}},
            "3": {
                "class_type": "FastARClassLabel",
                "inputs": {"labels": text, "label_set": label_set, "add_label": add_label},
            },
        }
        request = {"prompt": graph, "client_id": "x"}
        assert keep(request) is request
        monkeypatch.setattr(conditioning.ClassLabel, "hidden", SimpleNamespace(unique_id=node, prompt={}))
        return conditioning.ClassLabel.validate_inputs(text)

    def refused(*about: Any, **more: Any) -> str:
        return copy_context().run(checked, *about, **more)

    told = refused("dog", "demo")
    assert told.startswith("there is no class 'dog'; the demo has sunset, mountains, ")
    assert "'tabby'" in refused("tabby", "demo") and refused("tabby", "mar-base-ema") is True
    assert "Maltese dog, " in refused("dog", "mar-base-ema") and "sunset" not in refused("dog", "mar-base-ema")
    assert "Maltese dog (imagenet-1k)" in refused("dog", "mine.safetensors")
    # The list that was chosen counts, whatever the model; a value over a link is not known yet.
    assert "imagenet" not in refused("dog", "mar-base-ema", label_set="picture-book")
    assert "'tabby'" in refused("tabby", "demo", label_set=["8", 0])
    # What was chosen in the menu before another model was connected.
    assert refused("cat", "demo", add_label="tabby").startswith("add_label: there is no class 'tabby'; the demo")
    assert refused("cat", "demo", add_label="boat") is True and refused("cat", "demo", add_label=["8", 0]) is True
    # A node that the graph does not have, and requests that are no graph.
    assert refused("tabby", "demo", node="9") is True
    for broken in ({}, {"prompt": [1]}, {"prompt": None}, [], None):
        assert keep(broken) is broken
        assert conditioning.ClassLabel.validate_inputs("tabby") is True


def test_a_condition_that_does_not_fit_the_model_is_refused_before_it_is_made(monkeypatch):
    def asked(model: Loaded, maker: str) -> list[str]:
        graph = {"1": {"inputs": {"condition": ["2", 0]}}, "2": {"class_type": maker}}
        monkeypatch.setattr(node, "hidden", SimpleNamespace(unique_id="1", prompt=graph), raising=False)
        return node.check_lazy_status(model=model, preset=())

    for node in (samplers.LlamaGenSampler, sharing.AnySampler, samplers.MARSampler):
        (socket,) = [i for i in node.define_schema().inputs if i.id == "condition"]
        assert socket.about["lazy"]
        for model, maker in itertools.product((a_gpt(), a_mar()), ("FastARLlamaGenPrompt", "FastARTarPrompt")):
            with pytest.raises(UserError, match="^condition: .* reads class labels"):
                asked(model, maker)
        fits = [
            (a_gpt(), "FastARClassLabel"),
            (a_gpt(TEXT_SIZE), "FastARLlamaGenPrompt"),
            (a_drawer(), "FastARTarPrompt"),
        ]
        assert [asked(model, maker) for model, maker in fits] == [["condition"]] * 3


TEXTS = {
    "400 unknown words": ", ".join(f"word{i}" for i in range(400)),
    "16000 words": "a," * 16000,
    "ten million characters": "boat, " * 1_700_000,
    "long words": ",".join(f"golden retrievver {'x' * 150} {i}" for i in range(150)),
    "one long word": "x" * 30_000,
    "settings": "fasthybrid: " + ", ".join(f"name{i}=1" for i in range(900)),
    "plus signs": "+".join("mar" for _ in range(60)),
    "dots": "../" * 10_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_validation_does_little_for_every_text(name, tmp_path):
    """It runs on the server's event loop: no other client is answered meanwhile. difflib compares three words with a
    thousand names.
    """
    fake_comfy.state.folder = tmp_path
    for check in (
        conditioning.ClassLabel.validate_inputs,
        sharing.AnySampler.validate_inputs,
        sharing.LoadReport.validate_inputs,
    ):
        check(TEXTS[name])  # tables are built once
        assert statements(lambda check=check: check(TEXTS[name])) < 200_000, check
        said = check(TEXTS[name])
        assert said is True or len(said) < 1000


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """Stands in for the T5 encoder; what was loaded is in the list."""
    loaded = []

    def load_text_encoder(path, dtype, device, tokenizer):
        loaded.append((path.name, dtype, tokenizer))
        encode = SimpleNamespace(encode=lambda texts: [torch.ones(len(text.split()), 6) for text in texts])
        return SimpleNamespace(net=torch.nn.Linear(1, 1), encode=encode.encode)

    monkeypatch.setattr(conditioning, "load_text_encoder", load_text_encoder)
    monkeypatch.setattr(
        conditioning, "_encoder", ModelCache(host.devices.get_text_device, host.devices.get_text_offload_device)
    )
    monkeypatch.setattr(host.folders, "paths", lambda *kinds: [tmp_path])
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: ["one.safetensors", "folder/model.safetensors"])
    monkeypatch.setattr(host.folders, "t5_tokenizer", lambda: "ComfyUI's")
    (tmp_path / "one.safetensors").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").touch()
    return loaded


def text_prompt(text="a red  boat\n", encoder="one.safetensors", **changes):
    node = conditioning.TextPrompt
    return node.execute(**dropped(node, text=text, encoder=encoder, **{"images": 2, **changes})).result[0]


def test_a_prompt_is_encoded_and_the_encoder_kept_while_it_is_loaded(encoders):
    made = text_prompt()
    assert made.names == ("a red boat",) * 2 and [len(rows) for rows in made.features] == [3, 3]
    assert encoders == [("one.safetensors", "fp32", "ComfyUI's")]
    text_prompt("another one")
    assert len(encoders) == 1, "it was read again"
    kept = conditioning._encoder.get(("x", "y"), lambda: SimpleNamespace(net=torch.nn.Linear(1, 1)))
    text_prompt(encoder="folder")
    assert encoders[1:] == [("folder", "fp32", None)]  # its own tokenizer is in the folder
    kept.patcher.detach()  # one that is gone already
    text_prompt(encoder="folder")
    assert len(encoders) == 2
    conditioning._encoder._loaded.patcher.detach()
    text_prompt(encoder="folder")
    assert len(encoders) == 3, "ComfyUI unloaded it, and it was kept all the same"


BAD_TEXTS = [("text", "  \n"), ("text", "http://boat.com #### boat.png"), ("text", 5), ("encoder", "gone.safetensors")]
BAD_TEXTS += [("encoder", None), ("images", 0), ("dtype", "fp16"), ("allow_download", "yes")]


@pytest.mark.parametrize("field, value", BAD_TEXTS)
def test_text_prompts_that_cannot_be(encoders, field, value):
    with pytest.raises(UserError, match=f"^{field}: "):
        text_prompt(**{field: value})
    assert not encoders


def test_a_prompt_becomes_the_codes_that_a_script_gets():
    made = a_prompt(text="  a red boat\n")
    script = finish(tar_prompt(tiny_tar(), ["a red boat"] * 2, TarPromptSettings(), TokenNoise(3, range(2))))
    assert all(torch.equal(a, b) for a, b in zip(made.codes, script.condition.codes, strict=True))
    assert made.names == ("a red boat",) * 2 and made.size == 20 and [len(codes) for codes in made.codes] == [16, 16]
    assert not torch.equal(*made.codes) and torch.equal(a_prompt(images=1).codes[0], made.codes[0])
    assert [len(codes) for codes in a_prompt(detail="169").codes] == [4, 4]
    assert [(done, total) for done, total, _ in Progress.updates[:16]] == [(k + 1, 16) for k in range(16)]
    for text in ("", "<|im_end|> <I3>"):  # special tokens that are typed are text
        assert len(a_prompt(text=text, images=1).codes[0]) == 16


def test_room_is_made_for_the_language_models_cache_and_cancel_stops_it():
    loaded = Loaded.of(tiny_tar())
    a_prompt(loaded, images=64)
    ((patchers, about),) = fake_comfy.state.loaded
    draws = TokenNoise(3, range(64))
    kept = finish(tar_prompt(loaded.model, ["a red boat"] * 64, TarPromptSettings(), draws)).report.counts
    assert patchers == [loaded.patcher]
    assert kept["cache_bytes"] < about["memory_required"] < 100 * kept["cache_bytes"]
    fake_comfy.state.interrupt_at, fake_comfy.state.asked = 3, 0
    Progress.updates.clear()
    with pytest.raises(Interrupted):
        a_prompt(loaded)
    assert len(Progress.updates) == 3


BAD_PROMPTS = [("tar", 5), ("tar", a_gpt()), ("text", 5), ("text", "word " * 60), ("seed", -1), ("images", 0)]


@pytest.mark.parametrize("field, value", [*BAD_PROMPTS, ("detail", "700"), ("top_p", 2.0)])
def test_tar_prompts_that_cannot_be(field, value):
    with pytest.raises(UserError, match=f"^{field}: "):
        a_prompt(**{field: value})
    assert not fake_comfy.state.loaded, "something was loaded before the mistake was reported"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TA-Tok with and one without an image encoder."""
    folder = tmp_path_factory.mktemp("models")
    save(folder / "reader.safetensors", {"": tiny_ta_tok(READER).state_dict()}, name="tiny reader")
    seer = tiny_ta_tok(replace(TA_TOK, codes=20)).state_dict()
    save(folder / "seer.safetensors", {"": seer}, encoder_heads=3, input_size=16, name="seer")
    return folder


@pytest.fixture
def readers(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.folders, "paths", lambda *kinds: [written])
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: ["reader.safetensors", "seer.safetensors"])
    monkeypatch.setattr(
        conditioning, "_ta_tok", ModelCache(host.devices.get_compute_device, host.devices.get_offload_device)
    )


def codes_of(image, ta_tok="seer.safetensors", **changes):
    node = conditioning.ImageToCodes
    return node.execute(image=image, **dropped(node, ta_tok=ta_tok, **{"dtype": "fp32", **changes})).result[0]


def test_pictures_become_codes_each_for_itself(readers):
    pictures = torch.rand(9, 20, 12, 4, generator=torch.Generator().manual_seed(0))
    made = codes_of(pictures)  # in two batches
    assert len(made) == 9 and made.size == 20 and all(codes.shape == (25,) for codes in made.codes)
    for i in (0, 8):
        one = codes_of(pictures[i : i + 1], images=2)
        assert torch.equal(one.codes[0], made.codes[i]) and torch.equal(*one.codes)
        assert one.names == ("image 1",) * 2
    assert codes_of(pictures[:1, ..., :1], detail="169").codes[0].shape == (4,)
    assert [patchers for patchers, _ in fake_comfy.state.loaded[:1]] == [[conditioning._ta_tok._loaded.patcher]]
    assert Progress.updates[-1][:2] == (1, 1)
    fake_comfy.state.interrupt_at, fake_comfy.state.asked = 1, 0
    with pytest.raises(Interrupted):
        codes_of(pictures)


BAD_PICTURES = [("image", 5), ("ta_tok", "reader.safetensors"), ("ta_tok", "gone"), ("ta_tok", None), ("images", 200)]


@pytest.mark.parametrize("field, value", [*BAD_PICTURES, ("detail", "5")])
def test_pictures_that_cannot_be_read(readers, field, value):
    with pytest.raises(UserError, match=f"^{field}: "):
        codes_of(**{"image": torch.rand(2, 8, 8, 3), field: value})


def test_a_prompt_of_megabytes_is_refused_before_it_is_read() -> None:
    """Nothing encodes it, not even word by word to name the words that are unknown."""
    text = "word " * 200_000
    loaded = Loaded.of(replace(tiny_tar(), tokenize=lambda part: pytest.fail("it was encoded")))
    runs = {
        "text": [
            lambda: a_prompt(loaded, text=text),
            lambda: conditioning.Prompt.execute(text),
            lambda: conditioning.TextPrompt.execute(text, encoder="flan-t5-xl"),
        ],
        "negative": [lambda: conditioning.Prompt.execute("a boat", text)],
    }
    for field, calls in runs.items():
        for call in calls:
            with pytest.raises(UserError, match=f"^{field}: it has 1000000 characters"):
                call()


def test_an_empty_negative_prompt_is_the_one_that_a_model_was_trained_with():
    for empty in ("", " \n", UNCONDITIONAL):
        assert conditioning.Prompt.execute("a boat", empty).result[0].unconditional == UNCONDITIONAL
    assert conditioning.Prompt.execute("a boat", "red").result[0].unconditional == "red"


def test_an_empty_text_names_no_class():
    """It is not class 0."""
    for text in ("", "  \n", ", ;\n,"):
        for label_set in ("auto", "picture-book", "imagenet-1k"):
            with pytest.raises(UserError, match="^labels: it is empty"):
                label(text, label_set=label_set)


def test_a_label_set_that_this_version_does_not_know_takes_ids():
    """A file may name any; the command line takes ids too."""
    made = running.as_labels(label("7, 3"), "of a newer version")
    assert made.labels == (7, 3) and made.label_set == ""
    with pytest.raises(UserError, match="^condition: there is no class 'cat'.*give class ids from 0"):
        running.as_labels(label("cat"), "of a newer version")


@pytest.mark.parametrize(
    "graph", [{"1": 5}, {"1": {"inputs": 3}}, {"1": {"inputs": {"condition": ["3"]}}}, {"3": None}, [1], {"1": {}}]
)
def test_a_graph_of_any_shape_is_searched(graph, monkeypatch):
    monkeypatch.setattr(conditioning.ClassLabel, "hidden", SimpleNamespace(unique_id="3", prompt=graph))
    assert label("cat").text == "cat"
    node = SimpleNamespace(hidden=SimpleNamespace(unique_id="3", prompt=graph))
    assert graph_of_nodes.typed(node, "condition") is None
    assert graph_of_nodes.maker(node, "condition") == ""
    assert not graph_of_nodes.taken(node, 0) and graph_of_nodes.users(node, "condition") == []


def test_auto_chooses_the_dtype_of_encoders_for_the_device_that_computes(encoders, readers, tmp_path, monkeypatch):
    """The fake host has two devices here: weights stay on the CPU, for which auto is fp32."""
    picture = torch.rand(1, 20, 12, 3)
    asked = []
    one = conditioning.load_ta_tok
    monkeypatch.setattr(
        conditioning, "load_ta_tok", lambda path, dtype, device, **more: asked.append(dtype) or one(path, dtype, device)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(host.memory, "place", lambda net, device: None)  # there is no card
    codes_of(picture, dtype="auto")
    fake_comfy.state.places.update(get_torch="cuda:0")
    codes_of(picture, dtype="auto")
    assert asked == ["fp32", "bf16"]
    fake_comfy.state.places.update(text_encoder="cuda:0")
    monkeypatch.setattr(host.folders, "local_files", lambda *kinds: ["one.safetensors"])
    (tmp_path / "one.safetensors").touch()
    monkeypatch.setattr(host.folders, "paths", lambda *kinds: [tmp_path])
    text_prompt(dtype="auto")
    assert encoders[-1][1] == "bf16"


def test_most_images_of_a_batch_are_256():
    assert len(label("cat", images_per_label=256, label_set="picture-book").labels) == 256
    lines = "\n".join(f"boat {i}" for i in range(128))
    assert len(conditioning.Prompt.execute(lines, lines=True, images=2).result[0]) == 256
    with pytest.raises(UserError, match="^labels: 258 images"):
        label("cat, cat", images_per_label=129)
    with pytest.raises(UserError, match="^images: 387 images"):
        conditioning.Prompt.execute("a\nb\nc", lines=True, images=129)


def test_prompts_and_their_images_follow_one_another():
    made = conditioning.Prompt.execute("a boat\n\n a house", "the sea", lines=True, images=2).result[0]
    assert made.texts == ("a boat", "a boat", " a house", " a house") and made.unconditional == "the sea"
    assert conditioning.Prompt.execute("a\nb", lines=False, images=1).result[0].texts == ("a\nb",)


def test_every_seed_writes_other_codes():
    first, again, other = (a_prompt(seed=seed, images=1).codes[0] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
