"""Tar's files to models: layouts, ids from three sources, tokenizers, parts that belong together, and what is wrong in one sentence."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders import hub
from fastar_nodes.model_loaders.autoencoders import expect_codes, load_vq
from fastar_nodes.model_loaders.checkpoint import Checkpoint, read
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from fastar_nodes.model_loaders.networks.ta_tok import TATokModel
from fastar_nodes.model_loaders.networks.tar import SpecialTokens
from fastar_nodes.model_loaders.tar import (
    _special_tokens,
    expect_features,
    load_detokenizer,
    load_ta_tok,
    load_tar,
    parts_inside,
)
from fastar_nodes.model_loaders.tokenizer import Tokenizer, load_tokenizer
from qwen_reference import TINY, tiny_qwen
from safetensors.torch import load_file, save_file
from tar_files import CONFIG, DTOK, IDS, OF_CODES, WORDS, detokenizer_state, language_model, tiny_ta_tok, words
from tar_files import TA_TOK as TINY_TA_TOK
from test_ta_tok_network import head_names, layer_names

TA_TOK = {"encoder_heads": "3", "input_size": "16"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return language_model(tmp_path / "Tar-tiny")


def refused(load, path: Path, pattern: str, **options) -> str:
    with pytest.raises(UserError, match=pattern) as error:
        load(path, **options)
    text = str(error.value)
    assert (
        "\n" not in text
        and len(text) <= 400
        and text.split(":")[0] in ("checkpoint", "ta_tok", "decoder", "grid", "dtype", "text")
    )
    return text


# ------------------------------------------------------------------------------------------ language model: layouts


def shards(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    for i, part in enumerate((names[:9], names[9:]), 1):
        save_file({k: state[k] for k in part}, folder / f"model-0000{i}-of-00002.safetensors")


def same(a, b) -> bool:
    ours, theirs = a.net.state_dict(), b.net.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in ours.items())


def test_layouts(folder: Path, tmp_path: Path) -> None:
    model = load_tar(folder)
    assert (
        model.net.config == TINY
        and model.name == "Tar-tiny"
        and model.sides == (4, 2, 1)
        and model.repetition_penalty == 1.0
    )
    assert model.special == SpecialTokens(image=15, scale=16, code=20, codes=20) and model.span == (20, 40)
    expected = tiny_qwen().state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in model.net.state_dict().items())
    assert not model.net.training and not any(p.requires_grad or p.is_meta for p in model.net.parameters())
    assert model.prompt("A red boat.", 1) == [1, 2, 4, 10, 15, 17]
    by_file = load_tar(folder / "model.safetensors")
    assert same(by_file, model) and by_file.name == "Tar-tiny"
    shards(folder)
    for path in (folder, folder / "model-00002-of-00002.safetensors"):
        again = load_tar(path)
        assert same(again, model) and again.name == "Tar-tiny"
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(load_tar, folder, "^checkpoint: .* holds 1 of 2 shards")
    refused(load_tar, tmp_path / "gone", "^checkpoint: there is no file or folder")
    (tmp_path / "empty").mkdir()
    refused(load_tar, tmp_path / "empty", "^checkpoint: .*choose a folder or file with Tar's language model")


def test_one_file_with_everything_in_it(tmp_path: Path) -> None:
    path = tmp_path / "demo-tar.safetensors"
    metadata = {"config": json.dumps({**CONFIG, **IDS}), "tokenizer": json.dumps(words()), "name": "demo"}
    save_file(tiny_qwen().state_dict(), path, metadata=metadata)
    # What happens to lie beside it is another model's.
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "generation_config.json").write_text("{")
    model = load_tar(path)
    assert model.name == "demo" and model.prompt("the moon", 0) == [8, 9, 15, 16] and model.sides == (4, 2, 1)
    save_file(tiny_qwen().state_dict(), path, metadata={**metadata, "generation_config": '{"repetition_penalty": 1.2}'})
    assert load_tar(path).repetition_penalty == 1.2
    for key in ("config", "tokenizer", "generation_config"):
        save_file(tiny_qwen().state_dict(), path, metadata={**metadata, key: "[1]"})
        refused(load_tar, path, f"^checkpoint: .*{key}.*no JSON")


def test_a_tokenizer_beside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(tiny_qwen().state_dict(), path, metadata={"config": json.dumps({**CONFIG, **IDS})})
    refused(load_tar, path, "^checkpoint: .* has no tokenizer")
    (tmp_path / "tokenizer.json").write_text(json.dumps(words()))
    assert load_tar(path).prompt("a cat", 0) == [1, 5, 15, 16] and load_tar(path).name == "mine"
    other = {w: i for i, w in enumerate(reversed(WORDS[1:]))} | {"[UNK]": 13}
    (tmp_path / "mine.tokenizer.json").write_text(json.dumps(words(model={**words()["model"], "vocab": other})))
    assert load_tar(path).prompt("a cat", 0) == [12, 8, 15, 16], "the file's own goes first"


def test_output_matrix(folder: Path) -> None:
    state = tiny_qwen().state_dict()
    head = torch.randn(40, 24)
    save_file({**state, "lm_head.weight": head}, folder / "model.safetensors")
    assert load_tar(folder).net.config.tied, "the configuration decides, as upstream"
    (folder / "config.json").write_text(json.dumps({**CONFIG, **IDS, "tie_word_embeddings": False}))
    assert torch.equal(load_tar(folder).net.output.weight, head)
    save_file(state, folder / "model.safetensors")
    refused(load_tar, folder, "^checkpoint: .*lm_head.weight is missing")
    config = {k: v for k, v in {**CONFIG, **IDS}.items() if k != "tie_word_embeddings"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tar(folder).net.config.tied, "without a word the weights decide"


@pytest.mark.parametrize(
    ("value", "expected"), [(1.05, 1.05), (1, 1.0), (None, 1.0), *((x, None) for x in (0, -1, 7, "x", True))]
)
def test_repetition_penalty_of_the_checkpoint(folder: Path, value: object, expected: float | None) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": value, "top_p": 0.8}))
    if expected is None:
        refused(load_tar, folder, "^checkpoint: .*repetition_penalty")
    else:
        assert load_tar(folder).repetition_penalty == expected


def test_rotations_as_newer_transformers_write_them(folder: Path) -> None:
    config = {k: v for k, v in {**CONFIG, **IDS}.items() if not k.startswith("rope")}
    for rotation in (
        {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        {"rope_theta": 100, "rope_scaling": None},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **rotation}))
        assert load_tar(folder).net.config.theta == 100.0
    for rotation in (
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_scaling": "x"},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **rotation}))
        refused(load_tar, folder, "^checkpoint: .* uses an unsupported RoPE scaling")


# ---------------------------------------------------------------------------------------------------- ids


def without_ids(folder: Path, added: dict[str, int], **config) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text(json.dumps(words(added)))
    return folder


def test_ids_of_the_configuration_go_before_the_tokenizers(folder: Path) -> None:
    wrong = {"<im_start>": 0, "<S0>": 1, "<I0>": 2, "<I1>": 3}
    (folder / "tokenizer.json").write_text(json.dumps(words(wrong)))
    assert load_tar(folder).special == SpecialTokens(15, 16, 20, 20)


def test_ids_of_the_tokenizer(folder: Path) -> None:
    marks = {"<im_start>": 39, "<S0>": 14, "<S1>": 15, **{f"<I{i}>": 20 + i for i in range(9)}, "<I10>": 30}
    model = load_tar(without_ids(folder, marks))
    assert model.special == SpecialTokens(39, 14, 20, 9) and model.sides == (4, 2), (
        "two scales, nine codes without a gap"
    )
    chat = {**marks, "<|im_start|>": 16, "<|im_end|>": 17}
    assert load_tar(without_ids(folder, chat)).special.chat == (16, 17)
    prompt = load_tar(folder).prompt("red", 0)
    assert prompt[0] == 16 and prompt[-3:-1] == [13, 39] and prompt.count(16) == 3 and prompt.count(17) == 2


def test_official_ids_by_arithmetic(folder: Path) -> None:
    """A model with as many tokens as the official one, whose folder says nothing of them."""
    narrow = replace(TINY, vocab=1, dim=2, heads=1, kv_heads=1, queries=2, hidden=2)
    state = {**tiny_qwen(narrow).state_dict(), "model.embed_tokens.weight": torch.ones(217_206, 2)}
    save_file(state, folder / "model.safetensors")
    config = {"num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(words({})))
    model = load_tar(folder)
    assert (
        model.special == SpecialTokens(151_665, 151_667, 151_670, 65_536)
        and model.sides == (27, 13, 9)
        and model.span == (151_670, 217_206)
    )
    save_file({**state, "model.embed_tokens.weight": torch.ones(217_205, 2)}, folder / "model.safetensors")
    refused(
        load_tar,
        folder,
        "^checkpoint: .* has 217205 tokens and nothing states which .*choose a Tar, not a plain language model",
    )


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        ({"image_end_token_id": 40}, "image_end_token_id = 40 .* a whole number from 0 to 39"),
        ({"image_end_token_id": 19}, "image codes would be tokens 20 to 19"),
        ({"image_start_token_id": "<I0>"}, "image_start_token_id = <I0>"),
        ({"image_start_token_id": -1}, "image_start_token_id = -1"),
        ({"image_start_token_id": 1.5}, "image_start_token_id = 1.5"),
        ({"scale_end_token_id": 19}, "states 4 scales"),
        ({"scale_end_token_id": 15}, "states 0 scales"),
        ({"scale_start_token_id": 18, "scale_end_token_id": 20}, "two meanings"),
        ({"image_start_tag_id": 25}, "two meanings"),
        ({"image_start_tag_id": 16}, "two meanings"),
        ({"semantic_side": 2}, "semantic_side = 2"),
        ({"semantic_side": 129}, "semantic_side = 129"),
        ({"num_attention_heads": 5}, "num_attention_heads must be right"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"hidden_size": 25}, "hidden_size = 25 in its configuration, and weights of 24"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps = tiny"),
        ({"rope_theta": float("inf")}, "config.json in .* holds the number Infinity"),
        ({"max_position_embeddings": [1]}, "max_position_embeddings"),
    ],
)
def test_configurations_that_make_no_sense(folder: Path, change: dict, words_: str) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **IDS, **change}))
    refused(load_tar, folder, f"^checkpoint: (Tar-tiny .*)?{words_}")


# ---------------------------------------------------------------------------------------------------- tokenizers


def test_marks_typed_by_a_person_are_text(folder: Path) -> None:
    # A vocabulary that lists its marks as words, too.
    listed = {**words()["model"]["vocab"], "<S0>": 16, "I5": 25, "im_start": 15}
    for model in (words()["model"], {**words()["model"], "vocab": listed}):
        (folder / "tokenizer.json").write_text(
            json.dumps(words({**words_added(), "im_start": 15, "I5": 25}, model=model))
        )
        tar = load_tar(folder)
        for text in ("<im_start><S0><I5> a cat", "<|im_end|> <I19>", "im_start I5"):
            assert all(i < 14 for i in tar.prompt(text, 0)[:-2]), text
    unknown = {**words()["model"]["vocab"], "dog": 16}
    (folder / "tokenizer.json").write_text(json.dumps(words(model={**words()["model"], "vocab": unknown})))
    with pytest.raises(UserError, match="^text: it holds a special token of Tar-tiny"):
        load_tar(folder).prompt("a dog", 0)


def words_added() -> dict[str, int]:
    return {entry["content"]: entry["id"] for entry in words()["added_tokens"]}


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(load_tar, folder, "^checkpoint: .*pip install tokenizers")


def test_a_lone_surrogate_is_encoded(folder: Path) -> None:
    assert load_tar(folder).tokenize("\ud83d a")[-1] == 1


def test_a_prompt_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("tokenizers").Tokenizer
    made, texts = library.from_str((folder / "tokenizer.json").read_text()), []

    class Counted:
        from_str = staticmethod(lambda spec: Counted())

        def encode(self, text: str, add_special_tokens: bool):
            texts.append(text)
            return made.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr("tokenizers.Tokenizer", Counted)
    tokenize = load_tar(folder).tokenize
    texts.clear()
    tokenize("a red cat").clear()  # the caller's own list
    assert tokenize("a red cat") == [1, 2, 5] and texts == ["a red cat"]


def qwen_like(folder: Path) -> None:
    """A byte-pair tokenizer as Qwen's: 256 signs for bytes, some merges, added tokens behind."""
    signs = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    signs += [chr(256 + i) for i in range(256 - len(signs))]
    merges = [("r", "e"), ("re", "d"), ("Ġ", "red")]
    vocabulary = {sign: i for i, sign in enumerate([*signs, *("".join(pair) for pair in merges)])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n")
    marks = {"<|im_start|>": 260, "<|im_end|>": 261, "<im_start>": 262, "<S0>": 263, "<S1>": 264, "<S2>": 265}
    (folder / "added_tokens.json").write_text(json.dumps({**marks, **{f"<I{i}>": 266 + i for i in range(20)}}))


def test_vocabulary_and_merges(folder: Path) -> None:
    library = pytest.importorskip(
        "tokenizers", reason="tokenizers is not installed: Qwen's tokenizer cannot be tested here"
    )
    (folder / "tokenizer.json").unlink()
    qwen_like(folder)
    made = load_tokenizer(folder, "", {})
    vocabulary = json.loads((folder / "vocab.json").read_text())
    assert made.size == 259 and made.special_tokens["<I19>"] == 285 and made.special_tokens["<|im_start|>"] == 260
    assert made.encode("red red") == [vocabulary["red"], vocabulary["Ġred"]]
    assert made.encode("<I3>") == [vocabulary[sign] for sign in "<I3>"], "what a person types is text"
    assert made.encode("🙂") and len(made.encode("🙂" * 100)) == 400 and made.encode("") == []
    # The same as one file, as transformers writes it.
    about = json.loads(
        library.Tokenizer(library.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))).to_str()
    )
    about["normalizer"] = {"type": "NFC"}
    about["added_tokens"] = [
        {
            "id": i,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for name, i in made.special_tokens.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(about))
    again = load_tokenizer(folder, "", {})
    assert (
        again.special_tokens == made.special_tokens
        and again.size == made.size
        and again.encode("<|im_end|>") == made.encode("<|im_end|>")
    )


def test_qwen_marks_of_a_vocabulary_alone() -> None:
    bare = Tokenizer(lambda text: [], {}, 151_643)
    marks, scales = _special_tokens(Checkpoint({}, {}, Path("x")), {}, bare, 217_206)
    assert marks.chat == (151_644, 151_645) and scales == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": 3}',
        '{"model": {"type": "WordLevel", "vocab": {"a": "x"}, "unk_token": "a"}}',
        '{"model": {"vocab": {}}, "added_tokens": [3]}',
        "[" * 100000,
        '{"model": {"type": "nosuch"}}',
    ],
)
def test_damaged_tokenizers(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    refused(load_tar, folder, "^checkpoint: .*(tokenizer.json|tokenizers)")


# ---------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: s.pop("model.layers.0.self_attn.q_proj.weight"), "q_proj.weight is missing"),
        (lambda s: s.pop("model.layers.1.self_attn.q_proj.bias"), "1 missing"),
        (lambda s: s.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(4)}), "1 unexpected"),
        (lambda s: s.update({"model.embed_tokens.weight": torch.ones(40)}), "misshaped"),
        (lambda s: s.update({"model.layers.0.mlp.gate_proj.weight": torch.ones(())}), "misshaped"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, change, pattern: str) -> None:
    state = tiny_qwen().state_dict()
    change(state)
    save_file(state, folder / "model.safetensors")
    refused(load_tar, folder, f"^checkpoint: Tar-tiny .*{pattern}")


def test_other_files(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(load_tar, folder, "^checkpoint: config.json in .* cannot be read")
    for piece in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file(tiny_qwen().state_dict(), folder / piece)
    (folder / "model.safetensors").unlink()
    refused(load_tar, folder, "which another shard holds too; get the shards again$")


# ------------------------------------------------------------------------------------------------------- TA-Tok


def test_ta_tok_in_the_official_nesting(tmp_path: Path) -> None:
    net = tiny_ta_tok()
    state = net.state_dict()
    for prefix, hidden in (("encoder.", 20), ("decoder.vision_model.", 16)):
        state |= {k: torch.ones(s) for k, s in head_names(prefix, 24, hidden).items()}
    state |= {k: torch.ones(s) for k, s in layer_names("encoder.encoder.layers.2.", 24, 20).items()}
    state |= {f"encoder.post_layernorm.{w}": torch.ones(24) for w in ("weight", "bias")}
    state["teacher.something"] = torch.full((3,), float("nan"))
    args = {
        "input_size": 16,
        "bottleneck": {"name": "bottleneck", "args": {"bottleneck_dim": 10}},
        "teacher": "google/siglip2",
    }
    torch.save({"model": {"name": "ta_tok", "args": args, "sd": state}}, tmp_path / "ta_tok.pth")
    refused(load_ta_tok, tmp_path / "ta_tok.pth", "may lack an entry encoder_heads")  # 24 / 64 is no head count
    half = load_ta_tok(tmp_path / "ta_tok.pth", encoder=False)
    assert half.net.config == OF_CODES and not half.has_encoder and half.name == "ta_tok"
    codes = torch.randint(30, (1, 9))
    assert torch.equal(half.net.features(codes), net.features(codes))
    save_file(
        {k: v for k, v in state.items() if k != "teacher.something"}, tmp_path / "own.safetensors", metadata=TA_TOK
    )
    whole = load_ta_tok(tmp_path / "own.safetensors")
    assert whole.net.config == TINY_TA_TOK and whole.has_encoder
    image = torch.rand(1, 3, 20, 16)
    assert torch.equal(whole.codes(image), net.codes(image))
    save_file(net.state_dict(), tmp_path / "saved.safetensors", metadata=TA_TOK)
    assert load_ta_tok(tmp_path / "saved.safetensors").net.config == TINY_TA_TOK
    assert load_ta_tok(tmp_path / "saved.safetensors", "bf16").net.bottleneck.out_linear.weight.dtype == torch.bfloat16


def test_input_size_from_the_arguments(tmp_path: Path) -> None:
    # Heads of 64 fit a width of 64.
    wide = replace(TINY_TA_TOK, width=64, heads=2, encoder_heads=1)
    state = tiny_ta_tok(wide).state_dict()
    for size, expected in ((17, 17), (None, 15)):
        torch.save({"model": {"name": "x", "args": {"input_size": size}, "sd": state}}, tmp_path / "t.pth")
        with pytest.raises(UserError, match="12 attention heads do not fit the width 64"):
            load_ta_tok(tmp_path / "t.pth")
        save_file(
            state, tmp_path / "t.safetensors", metadata={"decoder_heads": "2", "args": json.dumps({"input_size": size})}
        )
        assert load_ta_tok(tmp_path / "t.safetensors").net.config.input_size == expected


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: s.pop("decoder.vision_model.encoder.layers.0.mlp.fc1.weight"), "fc1.weight is missing"),
        (lambda s: s.update({"bottleneck.regularizer.embedding.weight": torch.ones(30)}), "misshaped"),
        (
            lambda s: s.update({"decoder.vision_model.embeddings.position_embedding.weight": torch.ones(15, 24)}),
            "no square grid",
        ),
    ],
)
def test_ta_tok_that_does_not_fit(tmp_path: Path, change, pattern: str) -> None:
    state = tiny_ta_tok().state_dict()
    change(state)
    save_file(state, tmp_path / "t.safetensors", metadata=TA_TOK)
    refused(load_ta_tok, tmp_path / "t.safetensors", f"^ta_tok: t.safetensors .*{pattern}")


def test_ta_tok_metadata_that_makes_no_sense(tmp_path: Path) -> None:
    for key in ("encoder_heads", "decoder_heads", "input_size"):
        save_file(tiny_ta_tok().state_dict(), tmp_path / "t.safetensors", metadata={**TA_TOK, key: "many"})
        refused(load_ta_tok, tmp_path / "t.safetensors", f"^ta_tok: .*{key} = many")


# ------------------------------------------------------------------------------------------------- de-tokenizers

ARGS = {
    "n_layer": 2,
    "n_head": 2,
    "dim": 16,
    "vocab_size": 20,
    "cond_dim": 24,
    "cls_token_num": 4,
    "max_seq_len": 16,
    "model_type": "clip_cond",
}


def test_detokenizer_in_the_official_nesting(tmp_path: Path) -> None:
    state = detokenizer_state()
    torch.save({"model": {"name": "llama-abs-LP", "args": ARGS, "sd": state}}, tmp_path / "ar_dtok_lp_256px.pth")
    model = load_detokenizer(tmp_path / "ar_dtok_lp_256px.pth")
    assert model.net.config == DTOK and model.grid == 4 and model.name == "ar_dtok_lp_256px" and model.ta_tok is None
    assert all(torch.equal(v, state[k]) for k, v in model.net.state_dict().items())
    assert not model.net.training and not any(p.requires_grad or p.is_meta for p in model.net.parameters())
    assert load_detokenizer(tmp_path / "ar_dtok_lp_256px.pth", "bf16").net.output.weight.dtype == torch.bfloat16


def test_arguments_in_easydict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training scripts keep their arguments in a dictionary of the package easydict, which need not be here."""

    class EasyDict(dict):
        def __init__(self, found):
            super().__init__(found)
            self.__dict__.update(found)

    EasyDict.__module__, EasyDict.__qualname__ = "easydict", "EasyDict"
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "easydict", types.SimpleNamespace(EasyDict=EasyDict))
        args = EasyDict({**ARGS, "more": EasyDict({})})
        torch.save({"model": {"name": "x", "args": args, "sd": detokenizer_state()}}, tmp_path / "e.pth")
    assert load_detokenizer(tmp_path / "e.pth").grid == 4
    assert json.loads(read(tmp_path / "e.pth").metadata["args"]) == ARGS


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"n_layer": 3}, "weights of n_layer = 2, and arguments of 3"),
        ({"dim": 32}, "dim = 16, and arguments of 32"),
        ({"vocab_size": 21}, "vocab_size"),
        ({"cond_dim": 1152}, "cond_dim = 24"),
        ({"n_head": 3}, "heads: 3 does not fit the width 16"),
        ({"cls_token_num": 5}, "19 positions, and arguments of 16 picture tokens behind 5 condition rows"),
        ({"max_seq_len": 64}, "19 positions, and arguments of 64"),
        ({"max_seq_len": 17}, "19 positions"),
        ({"max_seq_len": "many"}, "max_seq_len = many"),
    ],
)
def test_arguments_that_contradict_the_weights(tmp_path: Path, change: dict, pattern: str) -> None:
    torch.save({"model": {"name": "x", "args": {**ARGS, **change}, "sd": detokenizer_state()}}, tmp_path / "d.pth")
    refused(load_detokenizer, tmp_path / "d.pth", f"^checkpoint: d.pth .*{pattern}")


def test_grid(tmp_path: Path) -> None:
    def write(name: str, rows: int, **metadata: str) -> Path:
        save_file(detokenizer_state(replace(DTOK, absolute=rows)), tmp_path / name, metadata={"heads": "2", **metadata})
        return tmp_path / name

    # Behind the official 729 condition rows the table's length tells.
    for rows, grid in ((984, 16), (1752, 32), (4824, 64)):
        assert load_detokenizer(write("a.safetensors", rows)).grid == grid
    assert load_detokenizer(write("x_512px.safetensors", 1100)).grid == 32
    assert load_detokenizer(write("a.safetensors", 19, grid="4")).grid == 4
    assert load_detokenizer(write("a.safetensors", 19), grid=3).grid == 3
    refused(
        load_detokenizer,
        write("a.safetensors", 19),
        "^grid: a.safetensors does not say how large its pictures are; choose",
    )
    refused(load_detokenizer, write("b_256_512.safetensors", 2000), "^grid: .*does not say how large")
    refused(
        load_detokenizer,
        tmp_path / "a.safetensors",
        "^grid: 5x5 tokens need at least 25 positions, a.safetensors has 19",
        grid=5,
    )
    refused(load_detokenizer, tmp_path / "a.safetensors", "^grid: 1 tokens a side is outside 2 to 128", grid=1)
    refused(
        load_detokenizer,
        write("c.safetensors", 984),
        "^grid: c.safetensors is for 16x16 tokens, not 32x32; choose auto$",
        grid=32,
    )
    refused(load_detokenizer, write("c.safetensors", 19, grid="x"), "grid = x")


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: s.pop("abs_pe"), "abs_pe is missing"),
        (lambda s: s.pop("clip_proj.weight"), "missing"),
        (lambda s: s.update({"tok_embeddings.weight": torch.ones(20)}), "embeddings are misshaped"),
        (lambda s: s.update({"clip_proj.weight": torch.ones(16)}), "misshaped"),
        (lambda s: s.update(abs_pe=torch.ones(19)), "misshaped"),
        (
            lambda s: s.update({"layers.0.attention.wqkv.weight": torch.ones(47, 16)}),
            "does not fit the attention weights",
        ),
    ],
)
def test_detokenizer_that_does_not_fit(tmp_path: Path, change, pattern: str) -> None:
    state = detokenizer_state()
    change(state)
    save_file(state, tmp_path / "d.safetensors", metadata={"heads": "2", "grid": "4"})
    refused(load_detokenizer, tmp_path / "d.safetensors", f"^checkpoint: d.safetensors .*{pattern}")


def test_head_count_of_official_widths(tmp_path: Path) -> None:
    state = detokenizer_state(replace(DTOK, dim=128, heads=2, kv_heads=2))
    save_file(state, tmp_path / "d.safetensors", metadata={"grid": "4"})
    assert load_detokenizer(tmp_path / "d.safetensors").net.config.heads == 2
    assert load_detokenizer(tmp_path / "d.safetensors", heads=4).net.config.heads == 4


# -------------------------------------------------------------------------------------------- parts that belong together


def test_parts_are_checked(tmp_path: Path) -> None:
    save_file(detokenizer_state(), tmp_path / "d.safetensors", metadata={"heads": "2", "grid": "4"})
    ta_tok = TATokModel(tiny_ta_tok(), "mine")
    model = load_detokenizer(tmp_path / "d.safetensors", ta_tok=ta_tok)
    assert model.ta_tok is ta_tok
    other = TATokModel(tiny_ta_tok(replace(TINY_TA_TOK, width=36)), "other")
    with pytest.raises(
        UserError,
        match="^ta_tok: other has features of width 36, d needs 24; choose the TA-Tok it was trained with.$",
    ):
        load_detokenizer(tmp_path / "d.safetensors", ta_tok=other)
    codes = replace(DTOK, condition="codes", condition_size=30)
    save_file(detokenizer_state(codes), tmp_path / "c.safetensors", metadata={"heads": "2", "grid": "4"})
    of_codes = load_detokenizer(tmp_path / "c.safetensors")
    assert of_codes.net.config == codes
    with pytest.raises(UserError, match="^ta_tok: c draws from codes themselves"):
        expect_features(ta_tok, of_codes)
    vq = VQModel(VQAutoencoder(VQConfig(ch=8, ch_mult=(1,), blocks=1, z_channels=4, codes=21, groups=4)), "vq")
    with pytest.raises(UserError, match="^decoder: vq has 21 codes, d writes 20"):
        expect_codes(vq, model)


def test_one_file_with_all_parts(tmp_path: Path) -> None:
    vq = VQAutoencoder(VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, codes=20, groups=4))
    state = detokenizer_state()
    state |= {f"ta_tok.{k}": v for k, v in tiny_ta_tok().state_dict().items()} | {
        f"vq.{k}": v for k, v in vq.state_dict().items()
    }
    path = tmp_path / "demo.safetensors"
    save_file(state, path, metadata={"heads": "2", "grid": "4", "groups": "4", **TA_TOK})
    assert parts_inside(path) == {"ta-tok", "vq"}
    ta_tok, decoder = load_ta_tok(path), load_vq(path)
    model = load_detokenizer(path, ta_tok=ta_tok)
    expect_codes(decoder, model)
    assert model.net.config == DTOK and ta_tok.net.config == TINY_TA_TOK and decoder.net.config.codes == 20
    save_file(detokenizer_state(), path)
    assert parts_inside(path) == frozenset() == parts_inside(tmp_path / "gone")
    refused(load_ta_tok, path, "^ta_tok: demo.safetensors holds a Tar de-tokenizer, not a TA-Tok")


# ----------------------------------------------------------------------------------------------------- catalogue


def test_catalogue(tmp_path: Path) -> None:
    official = [text for text in hub.menu("tar", []) if not text.startswith("demo")]
    assert official == ["tar-1.5b (download 3.29 GB, not pinned)", "tar-7b (download 16.17 GB, not pinned)"]
    local = ["Tar-1.5B/model.safetensors", "ta_tok.pth", "sub/ar_dtok_lp_512px.pth", "vq_ds16_t2i.pt", "my.pt"]
    shown = {
        "tar": ["Tar-1.5B", "my.pt", "tar-7b (download 16.17 GB, not pinned)"],
        "ta-tok": ["ta_tok.pth", "my.pt"],
        "dtok": [
            "sub/ar_dtok_lp_512px.pth",
            "my.pt",
            "ar-dtok-256 (download, not pinned)",
            "ar-dtok-1024 (download, not pinned)",
        ],
    }
    for family, expected in shown.items():
        assert [text for text in hub.menu(family, local) if not text.startswith("demo")] == expected
    assert hub.decoder_for("ar-dtok-256", None, "dtok") == hub.decoder_for("mine.pth", None, "dtok") == "vq16-t2i"
    assert hub.ta_tok_for("ar-dtok-256") == hub.ta_tok_for("mine.pth", tmp_path / "gone") == "ta-tok"
    save_file({"a": torch.ones(1)}, tmp_path / "own.safetensors", metadata={"ta_tok": "../evil"})
    assert hub.ta_tok_for("own.safetensors", tmp_path / "own.safetensors") == "ta-tok"
    with pytest.raises(UserError, match="^checkpoint: tar-7b is a Tar language model, not a Tar de-tokenizer"):
        hub.check("tar-7b", "dtok", [])
    with pytest.raises(UserError, match="^checkpoint: ta-tok .*choose it as ta_tok$"):
        hub.check("ta-tok", "dtok", [])
