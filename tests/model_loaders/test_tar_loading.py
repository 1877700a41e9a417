"""Tar's files to models: layouts, ids of special tokens, tokenizers, and parts that belong together."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.autoencoders.loader import expect_codes
from fastar_nodes.model_loaders.files.checkpoint import read
from fastar_nodes.model_loaders.files.tokenizer import Tokenizer, load_tokenizer
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from fastar_nodes.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from fastar_nodes.networks.ta_tok import TATokModel
from fastar_nodes.networks.tar import SpecialTokens
from qwen_reference import TINY, language_logits, tiny_qwen
from safetensors.torch import load_file, save_file
from tar_files import CONFIG, DTOK, IDS, OF_CODES, WORDS, detokenizer_state, language_model, tiny_ta_tok, words
from tar_files import TA_TOK as TINY_TA_TOK
from test_ta_tok_network import official_names

TA_TOK = {"encoder_heads": "3", "input_size": "16"}
STATED = {"heads": "2", "grid": "4"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return language_model(tmp_path / "Tar-tiny")


def refused(load, path: Path, pattern: str, **options) -> None:
    with pytest.raises(UserError, match=pattern) as error:
        load(path, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 400


def configure(folder: Path, without: str = "-", **changes) -> Path:
    """Change config.json; entries that begin with ``without`` are left out."""
    config = {k: v for k, v in {**CONFIG, **IDS, **changes}.items() if not k.startswith(without)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_window_that_leaves_out_no_position_is_none(folder: Path) -> None:
    """Qwen2's configurations state a window as long as their positions."""
    stated = {"use_sliding_window": True, "sliding_window": TINY.positions}
    assert load_tar(configure(folder, **stated)).net.config == TINY
    refused(load_tar, configure(folder, **{**stated, "sliding_window": TINY.positions - 1}), "states sliding_window")


def test_layouts(folder: Path, tmp_path: Path) -> None:
    model, expected = load_tar(folder), tiny_qwen().state_dict()
    assert model.net.config == TINY and model.name == "Tar-tiny"
    assert model.sides == (4, 2, 1) and model.repetition_penalty == 1.0
    assert model.special == SpecialTokens(image=15, scale=16, code=20, codes=20) and model.span == (20, 40)
    assert model.prompt("A red boat.", 1) == [1, 2, 4, 10, 15, 17]
    state = load_file(folder / "model.safetensors")
    by_file = load_tar(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    for i, part in enumerate((names[:9], names[9:]), 1):
        save_file({k: state[k] for k in part}, folder / f"model-0000{i}-of-00002.safetensors")
    for again in (by_file, load_tar(folder), load_tar(folder / "model-00002-of-00002.safetensors")):
        assert again.name == "Tar-tiny"
        assert all(torch.equal(v, expected[k]) for k, v in again.net.state_dict().items())
    save_file(state, folder / "model-00001-of-00002.safetensors")
    refused(load_tar, folder, "but another shard holds the same weights")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(load_tar, folder, "^checkpoint: .* 1 of 2 shards")
    refused(load_tar, tmp_path / "gone", "^checkpoint: there is no file or folder")
    (tmp_path / "empty").mkdir()
    refused(load_tar, tmp_path / "empty", "^checkpoint: .*choose a folder or file with a Tar language model")


def test_one_file_with_everything_in_it(tmp_path: Path) -> None:
    path = tmp_path / "demo-tar.safetensors"
    metadata = {"config": json.dumps({**CONFIG, **IDS}), "tokenizer": json.dumps(words()), "name": "demo"}
    save_file(tiny_qwen().state_dict(), path, metadata=metadata)
    # What happens to lie beside it is another model's.
    for name in ("config", "generation_config"):
        (tmp_path / f"{name}.json").write_text("{")
    model = load_tar(path)
    assert model.name == "demo" and model.prompt("the moon", 0) == [8, 9, 15, 16] and model.sides == (4, 2, 1)
    save_file(tiny_qwen().state_dict(), path, metadata={**metadata, "generation_config": '{"repetition_penalty": 1.2}'})
    assert load_tar(path).repetition_penalty == 1.2


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
    state, head = tiny_qwen().state_dict(), torch.randn(40, 24)
    save_file({**state, "lm_head.weight": head}, folder / "model.safetensors")
    made = load_tar(folder).net
    assert torch.equal(made.output.weight, head), (
        "another stored matrix goes before the configuration, as in transformers 5"
    )
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert load_tar(folder).net.config.tied, "an equal one is the embedding"
    save_file({**state, "lm_head.weight": head}, folder / "model.safetensors")
    assert torch.equal(load_tar(configure(folder, tie_word_embeddings=False)).net.output.weight, head)
    save_file({**state, "rotary_emb.inv_freq": torch.ones(2)}, folder / "model.safetensors")
    refused(load_tar, folder, "^checkpoint: .*lm_head.weight is missing")
    assert load_tar(configure(folder, without="tie_")).net.config.tied, "without a word the weights decide"
    refused(load_tar, configure(folder, tie_word_embeddings="no"), "^checkpoint: .*tie_word_embeddings = 'no'")


def test_names_of_a_model_with_an_image_reader(folder: Path) -> None:
    """Its language model is a part of it, in the weights' names and in the configuration."""
    expected = load_tar(folder)
    state = {k.replace("model.", "model.language_model.", 1): t for k, t in tiny_qwen().state_dict().items()}
    save_file(state, folder / "model.safetensors")
    inside = {k: v for k, v in CONFIG.items() if k != "semantic_side"}
    (folder / "config.json").write_text(json.dumps({"text_config": inside, "semantic_side": 4, **IDS}))
    made = load_tar(folder)
    assert made.net.config == expected.net.config and made.special == expected.special
    assert all(torch.equal(v, expected.net.state_dict()[k]) for k, v in made.net.state_dict().items())


def test_the_network_of_a_file_that_transformers_saved(tmp_path: Path) -> None:
    """With a base of RoPE that is no default, in the form of the installed version; equal logits in fp32."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**sizes, **heads, tie_word_embeddings=True, rope_theta=7.0)
    reference = transformers.Qwen2ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "tar")
    saved = json.loads((tmp_path / "tar" / "config.json").read_text())
    (tmp_path / "tar" / "config.json").write_text(json.dumps({**saved, **IDS, "semantic_side": 4}))
    (tmp_path / "tar" / "tokenizer.json").write_text(json.dumps(words()))
    net = load_tar(tmp_path / "tar", "fp32").net
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = reference(input_ids=ids).logits
    assert net.config.theta == 7.0
    torch.testing.assert_close(language_logits(net, ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "expected"), [(1.05, 1.05), (1, 1.0), (None, 1.0), *((x, None) for x in (0, -1, 7, "x", True))]
)
def test_repetition_penalty_of_the_checkpoint(folder: Path, value: object, expected: float | None) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": value, "top_p": 0.8}))
    if expected is None:
        refused(load_tar, folder, "^checkpoint: .*repetition_penalty")
    else:
        assert load_tar(folder).repetition_penalty == expected


# Entries of config.json to the values that are refused, and a word of the refusal where it is not the entry.
SENSELESS = {
    "image_end_token_id": (40, (19, "do not fit .* 20 to 19 for image codes")),
    "image_start_token_id": (
        "<I0>",
        -1,
        1.5,
        (18, "do not fit this number or one another"),
        (None, "config.json does not state which of them are image codes"),
    ),
    "scale_start_token_id": ((19, "do not fit .* for scales"),),
    "scale_end_token_id": ((19, "do not fit .* for scales"), (15, "do not fit .* for scales")),
    "image_start_tag_id": ((25, "one another: 25 for the start"), (16, "one another: 16 for the start")),
    "semantic_side": (2, 129),
}


@pytest.mark.parametrize("entry", SENSELESS)
@pytest.mark.fast_cases(every=3)
def test_configurations_that_make_no_sense(folder: Path, entry: str) -> None:
    for value in SENSELESS[entry]:
        value, word = value if isinstance(value, tuple) else (value, entry)
        refused(load_tar, configure(folder, **{entry: value}), f"^checkpoint: .*{word}")


def test_official_ids(folder: Path) -> None:
    """A model with as many tokens as the official one, whose configuration says nothing of them."""
    narrow = replace(TINY, vocab=1, dim=2, heads=1, kv_heads=1, queries=2, hidden=2)
    state = {**tiny_qwen(narrow).state_dict(), "model.embed_tokens.weight": torch.ones(217_206, 2)}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_attention_heads": 1}')
    model = load_tar(folder)
    assert model.special == SpecialTokens(151_665, 151_667, 151_670, 65_536)
    assert model.sides == (27, 13, 9) and model.span == (151_670, 217_206)
    save_file({**state, "model.embed_tokens.weight": torch.ones(217_205, 2)}, folder / "model.safetensors")
    refused(load_tar, folder, "^checkpoint: .* has 217205 tokens, but config.json does not state which")


def test_special_tokens_of_a_chat(folder: Path) -> None:
    named = {entry["content"]: entry["id"] for entry in words()["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(words({**named, "<|im_start|>": 13, "<|im_end|>": 14})))
    assert load_tar(folder).special.chat == (13, 14)
    (folder / "tokenizer.json").write_text(json.dumps(words({**named, "<|im_start|>": 13, "<|im_end|>": 40})))
    refused(load_tar, folder, "^checkpoint: .* has 40 token ids, .* 13 and 40 for a chat")


def test_special_tokens_in_a_prompt_are_text(folder: Path) -> None:
    named = {entry["content"]: entry["id"] for entry in words()["added_tokens"]} | {"im_start": 15, "I5": 25}
    vocabulary = words()["model"]["vocab"]
    # Also if the vocabulary lists them as words.
    for listed in ({}, {"<S0>": 16, "I5": 25, "im_start": 15}):
        model = {**words()["model"], "vocab": {**vocabulary, **listed}}
        (folder / "tokenizer.json").write_text(json.dumps(words(named, model=model)))
        tar = load_tar(folder)
        for text in ("<im_start><S0><I5> a cat", "<|im_end|> <I19>", "im_start I5"):
            assert all(i < 14 for i in tar.prompt(text, 0)[:-2]), text
    model = {**words()["model"], "vocab": {**vocabulary, "dog": 16}}
    (folder / "tokenizer.json").write_text(json.dumps(words(model=model)))
    with pytest.raises(UserError, match="^text: .* a special token of Tar-tiny"):
        load_tar(folder).prompt("a dog", 0)


def test_a_lone_surrogate_is_encoded(folder: Path) -> None:
    assert load_tar(folder).tokenize("\ud83d a")[-1] == 1


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    """Qwen's files. Without a space in front, and by Qwen's
    pattern alone: it keeps a sign and the word behind it together.
    """
    pytest.importorskip("tokenizers")
    signs = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
    signs += [chr(256 + i) for i in range(256 - len(signs))]
    merges = ["r e", "re d", "\u0120 red", "( a"]
    vocabulary = {sign: i for i, sign in enumerate([*signs, *(pair.replace(" ", "") for pair in merges)])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 260, "<|im_end|>": 261}')
    made = load_tokenizer(tmp_path, "", {})
    assert made.size == 260 and made.chat_tokens() == (260, 261)
    for text, tokens in (
        ("red red", ["red", "\u0120red"]),
        ("(ab a", ["(a", "b", "\u0120", "a"]),
        ("\u00e9", ["\u00c3", "\u00a9"]),
    ):
        assert made.encode(text) == [vocabulary[token] for token in tokens]
    assert len(made.encode("<|im_start|>")) == 12


def test_qwens_chat_tokens_by_the_size_of_its_vocabulary() -> None:
    assert Tokenizer(lambda text: [], {}, 151_643, str).chat_tokens() == (151_644, 151_645)
    assert Tokenizer(lambda text: [], {}, 151_642, str).chat_tokens() is None


def test_ta_tok_in_the_official_nesting(tmp_path: Path) -> None:
    net = tiny_ta_tok()
    state = {name: torch.ones(shape) for name, shape in official_names(TINY_TA_TOK).items()} | net.state_dict()
    used, state["teacher.something"] = dict(state), torch.full((3,), float("nan"))
    args = {"input_size": 16, "bottleneck": {"name": "bottleneck"}, "teacher": "google/siglip2"}
    torch.save({"model": {"name": "ta_tok", "args": args, "sd": state}}, tmp_path / "ta_tok.pth")
    refused(load_ta_tok, tmp_path / "ta_tok.pth", "may lack an entry encoder_heads")  # 24 / 64 is no head count
    half = load_ta_tok(tmp_path / "ta_tok.pth", encoder=False)
    assert half.net.config == OF_CODES and not half.net.config.encoder_depth and half.name == "ta_tok"
    codes, image = torch.randint(30, (1, 9)), torch.rand(1, 3, 20, 16)
    assert torch.equal(half.net.features(codes), net.features(codes))
    save_file(used, tmp_path / "own.safetensors", metadata=TA_TOK)
    whole = load_ta_tok(tmp_path / "own.safetensors")
    assert (
        whole.net.config == TINY_TA_TOK
        and whole.net.config.encoder_depth
        and torch.equal(whole.codes(image), net.codes(image))
    )


@pytest.mark.parametrize(("size", "expected"), [(17, 17), (None, 15)])
def test_input_size_from_the_arguments(tmp_path: Path, size: int | None, expected: int) -> None:
    state = tiny_ta_tok(replace(TINY_TA_TOK, width=192, encoder_heads=3)).state_dict()  # head counts of official widths
    torch.save({"model": {"name": "x", "args": {"input_size": size}, "sd": state}}, tmp_path / "t.pth")
    assert load_ta_tok(tmp_path / "t.pth").net.config.input_size == expected


ARGS = {
    **{"n_layer": 2, "n_head": 2, "dim": 16, "vocab_size": 20, "cond_dim": 24},
    **{"cls_token_num": 4, "max_seq_len": 16, "model_type": "clip_cond"},
}


def official(path: Path, **changes) -> Path:
    """A de-tokenizer in the official nesting."""
    torch.save({"model": {"name": "llama", "args": {**ARGS, **changes}, "sd": detokenizer_state()}}, path)
    return path


def test_detokenizer_in_the_official_nesting(tmp_path: Path) -> None:
    model, state = load_detokenizer(official(tmp_path / "ar_dtok_lp_256px.pth")), detokenizer_state()
    assert model.net.config == DTOK and model.grid == 4 and model.name == "ar_dtok_lp_256px" and model.ta_tok is None
    assert all(torch.equal(v, state[k]) for k, v in model.net.state_dict().items())


def test_norm_epsilon_from_the_arguments(tmp_path: Path) -> None:
    assert load_detokenizer(official(tmp_path / "d.pth", norm_eps=1e-3)).net.config.eps == 1e-3
    assert load_detokenizer(official(tmp_path / "d.pth")).net.config.eps == 1e-5


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
        ({"n_layer": 3}, "n_layer = 3 in its configuration, but its weights have 2"),
        ({"dim": 32}, "dim = 32"),
        ({"vocab_size": 21}, "vocab_size"),
        ({"cond_dim": 1152}, "cond_dim = 1152"),
        ({"n_head": 3}, "heads: 3 does not fit the width 16"),
        ({"cls_token_num": 5}, "19 positions, .* 16 image tokens after a condition of 5 rows"),
        ({"max_seq_len": 64}, "19 positions, .* 64"),
        ({"max_seq_len": 17}, "max_seq_len = 17 image tokens .*, but 17 is not a square number"),
        ({"max_seq_len": "many"}, "max_seq_len = 'many'"),
        ({"model_type": "class_cond"}, "model_type = 'class_cond'"),
        ({"norm_eps": 2.0}, "norm_eps = 2.0"),
    ],
)
def test_arguments_that_contradict_the_weights(tmp_path: Path, change: dict, pattern: str) -> None:
    refused(load_detokenizer, official(tmp_path / "d.pth", **change), f"^checkpoint: d.pth .*{pattern}")


def test_grid(tmp_path: Path) -> None:
    def write(name: str, rows: int, **metadata: str) -> Path:
        save_file(detokenizer_state(replace(DTOK, absolute=rows)), tmp_path / name, metadata={"heads": "2", **metadata})
        return tmp_path / name

    # Positions of the official 729 condition rows and of the grid's tokens but one.
    for grid in (2, 16, 32, 64):
        assert load_detokenizer(write("a.safetensors", 728 + grid**2)).grid == grid
        for rest in (-1, 1):
            refused(
                load_detokenizer,
                write("a.safetensors", 728 + grid**2 + rest),
                "^grid: a.safetensors does not state the size",
            )
    assert load_detokenizer(write("x_512px.safetensors", 1100)).grid == 32
    assert load_detokenizer(write("a.safetensors", 19, grid="4")).grid == 4
    assert load_detokenizer(write("a.safetensors", 19), grid=3).grid == 3
    for path, grid, pattern in (
        (write("b_256_512.safetensors", 2000), None, "has several image sizes in its name"),
        (write("c.safetensors", 984), 32, "32x32 tokens need at least 1024 positions, but c.safetensors has 984"),
        (tmp_path / "a.safetensors", 5, "5x5 tokens need at least 25 positions, but a.safetensors has 19"),
        (tmp_path / "a.safetensors", 1, "1 tokens per side are not possible; choose 2 to 128"),
    ):
        refused(load_detokenizer, path, f"^grid: .*{pattern}", grid=grid)


def test_head_count_of_official_widths(tmp_path: Path) -> None:
    state = detokenizer_state(replace(DTOK, dim=128, heads=2, kv_heads=2))
    save_file(state, tmp_path / "d.safetensors", metadata={"grid": "4"})
    assert load_detokenizer(tmp_path / "d.safetensors").net.config.heads == 2
    assert load_detokenizer(tmp_path / "d.safetensors", heads=4).net.config.heads == 4


def test_parts_are_checked(tmp_path: Path) -> None:
    save_file(detokenizer_state(), tmp_path / "d.safetensors", metadata=STATED)
    ta_tok = TATokModel(tiny_ta_tok(), "mine")
    model = load_detokenizer(tmp_path / "d.safetensors", ta_tok=ta_tok)
    assert model.ta_tok is ta_tok
    other = TATokModel(tiny_ta_tok(replace(TINY_TA_TOK, width=36)), "other")
    refused(load_detokenizer, tmp_path / "d.safetensors", "^ta_tok: other has features of width 36", ta_tok=other)
    vq = VQModel(VQAutoencoder(VQConfig(ch=8, ch_mult=(1,), blocks=1, z_channels=4, codes=21, groups=4)), "vq")
    with pytest.raises(UserError, match="^decoder: vq has 21 codes, but d has 20"):
        expect_codes(vq, model)
