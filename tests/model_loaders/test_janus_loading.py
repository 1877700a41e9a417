"""Janus' loader: layouts, shards and pickles, what is left out, special tokens, and files of other models."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.janus.loader import load_janus, load_janus_vq
from fastar_nodes.model_loaders.kinds import identify
from fastar_nodes.runs import loading
from janus_files import FOLDER, in_transformers_layout, one_file
from safetensors.torch import load_file, save_file

ORIGINAL = FOLDER / "original"


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return load_file(ORIGINAL / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of ``original`` without weights."""
    return Path(shutil.copytree(ORIGINAL, tmp_path / "x", ignore=shutil.ignore_patterns("model.safetensors")))


def same(a: Path, b: Path = ORIGINAL) -> bool:
    """Whether two files give equal networks and prompts."""
    mine, other = load_janus(a), load_janus(b)
    vq, other_vq = load_janus_vq(a).net.state_dict(), load_janus_vq(b).net.state_dict()
    pairs = [(mine.net.state_dict(), other.net.state_dict()), (vq, other_vq)]
    equal = all(p.keys() == q.keys() and all(torch.equal(p[k], q[k]) for k in p) for p, q in pairs)
    return equal and mine.net.config == other.net.config and mine.prompt("a boat") == other.prompt("a boat")


@pytest.mark.slow
def test_layouts_shards_and_pickles_are_the_same(tmp_path, folder, state):
    assert same(in_transformers_layout(tmp_path / "transformers"))
    torch.save(state, folder / "pytorch_model.bin")
    assert same(folder)
    (folder / "pytorch_model.bin").unlink()
    names = sorted(state)
    for i in (0, 1):
        part = {name: state[name] for name in names[i::2]}
        torch.save(part, folder / f"pytorch_model-0000{i + 1}-of-00002.bin")
    assert same(folder) and same(folder / "pytorch_model-00002-of-00002.bin")
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(UserError, match="^checkpoint: .*1 of 2 shards"):
        load_janus(folder)


def test_one_file_with_everything_in_its_metadata(tmp_path):
    model = load_janus(one_file(tmp_path / "one.safetensors"))
    assert same(tmp_path / "one.safetensors") and (model.grid, model.name) == (4, "Tiny Janus")
    with pytest.raises(UserError, match="^grid: .*4x4"):
        load_janus(tmp_path / "one.safetensors", grid=8)


def test_what_pictures_do_not_need_is_not_read(folder, state):
    """Nothing of it is in the networks, and NaN in it does no harm."""
    kept = ("language_model.model.", "gen_")
    spoilt = {k: t if k.startswith(kept) else torch.full_like(t, float("nan")) for k, t in state.items()}
    assert any(t.isnan().any() for t in spoilt.values())
    save_file(spoilt, folder / "model.safetensors")
    assert same(folder)
    net = load_janus(folder).net
    assert net.official_name("words.weight") in state and not hasattr(net, "vision_model")


def test_folded_rows_are_those_of_the_table_and_its_mlp(state):
    net = load_janus(ORIGINAL).net
    x = torch.nn.functional.gelu(
        state["gen_embed.weight"].float() @ state["gen_aligner.layers.0.weight"].float().T
        + state["gen_aligner.layers.0.bias"].float()
    )
    rows = x @ state["gen_aligner.layers.2.weight"].float().T + state["gen_aligner.layers.2.bias"].float()
    torch.testing.assert_close(net.tok_embeddings(torch.arange(len(rows))), rows, rtol=0, atol=1e-5)


def test_special_tokens_come_from_the_tokenizer():
    one, seven = load_janus(ORIGINAL), load_janus(FOLDER / "sharded")
    assert (one.template.begin, one.template.image, one.net.config.pad) == (300, 303, 302)
    assert (seven.template.begin, seven.template.image, seven.net.config.pad) == (262, 278, 277)
    assert (seven.net.config.heads, one.net.config.heads) == (1, 4)
    words = {one.template.user, one.template.assistant, one.template.image}
    inside = one.prompt("<|User|> and <begin_of_image> <|Assistant|>")
    assert sum(i in words for i in inside) == 3 and inside == one.prompt(
        " <|User|> and <begin_of_image> <|Assistant|>\n"
    )


def test_a_janus_1_3b_has_roles_in_words(tmp_path):
    model = load_janus(shutil.copytree(ORIGINAL, tmp_path / "Janus-1.3B"))
    assert model.template.user is None and load_janus(ORIGINAL).template.user == 315
    assert model.prompt("x") != load_janus(ORIGINAL).prompt("x")


def test_prompts_that_cannot_be_read():
    model = load_janus(ORIGINAL)
    for text, found in (
        ("word " * 3000, "^text: .*2048"),
        ("x" * 20_001, "^text: it has 20001 characters; give at most 20000"),
    ):
        with pytest.raises(UserError, match=found):
            model.prompt(text)
    with pytest.raises(UserError, match="^text: .*token 9999"):
        replace(model, tokenize=lambda text: [9999]).prompt("x")


def test_copies_for_mlx(folder, state):
    moved = {k: t.permute(0, 2, 3, 1).contiguous() if t.ndim == 4 else t for k, t in state.items()}
    save_file(moved, folder / "model.safetensors")
    with pytest.raises(UserError, match="^decoder: x .*MLX"):
        load_janus_vq(folder)


def added(tokens: list, name: str, **changes) -> None:
    next(token for token in tokens if token["content"] == name).update(changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["added_tokens"].pop(2),
        lambda t: added(t["added_tokens"], "<begin_of_image>", content="<image>"),
        lambda t: added(t["added_tokens"], "<begin_of_image>", id=299),
        lambda t: t["pre_tokenizer"]["pretokenizers"][5].update(individual_digits=3),
    ],
)
@pytest.mark.fast_cases(every=3)
def test_wrong_tokenizers(folder, state, change):
    save_file(state, folder / "model.safetensors")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="^checkpoint: "):
        load_janus(folder)


@pytest.mark.parametrize("name", ["Janus-Pro-7B", "Janus-4o-7B", "Janus-Pro-R1-7B"])
def test_finetuned_models_have_the_prompts_of_janus_pro(tmp_path, name):
    """Both authors' text-to-image code writes "<|User|>: TEXT", two line feeds and "<|Assistant|>:<begin_of_image>"."""
    shutil.copytree(ORIGINAL, tmp_path / name)
    model = load_janus(tmp_path / name)
    special = model.tokenize  # of the text between the special tokens
    named = json.loads((tmp_path / name / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in named}
    begin = ids["<\uff5cbegin\u2581of\u2581sentence\uff5c>"]
    turns = [begin, ids["<|User|>"], *special(": a cat\n\n"), ids["<|Assistant|>"], *special(":")]
    assert model.prompt("a cat") == [*turns, ids["<begin_of_image>"]]


def test_identification(tmp_path, state):
    renamed = in_transformers_layout(tmp_path / "t")
    assert identify(state) == identify(load_file(renamed / "model.safetensors")) == "janus"
    assert {loading.identify(path)[0] for path in (ORIGINAL, renamed, FOLDER / "sharded")} == {"janus"}


def test_a_janus_is_loaded_with_its_own_decoder():
    source = loading.Source(lambda choice, family: Path(choice), torch.device("cpu"), "fp32")
    ready = loading.load("janus", str(ORIGINAL), source)
    assert ready.vq.net.config.codes == ready.config.vocab == 128
    assert loading.defaults(ready) == {"cfg": 5.0, "top_k": 0} and ready.condition == "prompt"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read as Linux reports it")
def test_loading_takes_little_more_memory_than_the_weights_that_are_kept(root, tmp_path):
    """Names and parts of the 1B at a quarter of its width."""
    shapes = json.loads((FOLDER / "janus_keys_1b_original.json").read_text())["keys"]
    narrow = {2048: 512, 5632: 1408}
    kept = {
        k: v if k.startswith(("gen_vision", "vision")) else [narrow.get(n, n) for n in v] for k, v in shapes.items()
    }
    (tmp_path / "keys.json").write_text(json.dumps({"keys": kept}))
    script = [
        sys.executable,
        str(root / "tests" / "lib" / "janus_memory.py"),
        str(tmp_path / "keys.json"),
        str(tmp_path),
    ]
    done = subprocess.run([*script, "bf16"], capture_output=True, text=True, timeout=300, check=True)
    beyond, weights, imported = done.stdout.split()
    assert int(weights) > 150e6 and int(beyond) <= 64e6 and imported == "False", done.stdout
