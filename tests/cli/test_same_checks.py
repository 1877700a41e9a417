"""What is typed on the command line is checked as the nodes check it, and every remedy that a message names works."""

import shlex
from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import official
from fastar_nodes.model_loaders.llamagen.captions import prompt_of
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.networks.mar import MARModel
from fastar_nodes.runs import batches, loading
from fastar_nodes.runs.batches import expect_little_noise
from fastar_nodes.runs.labels import unknown_words
from fastar_nodes.runs.loading import Drafts, Ready, Source
from fastar_nodes.runs.registry import LLAMAGEN
from fastar_nodes.samplers.mar.settings import MARSettings
from tiny_files import write_gpt, write_vq

QUICK = "--device cpu --set steps=2 --set diffusion_steps=2"


# ------------------------------------------------------------------------------------------------ labels and prompts


def test_more_labels_than_images_are_refused_before_they_are_built(cli, tiny_demo, sentence):
    labels = ",".join(["0"] * 8000)
    assert sentence(cli(f"compare {QUICK} --samplers mar --batch 1024 --label {labels}")).startswith(
        "batch: 8192000 images"
    )


class Words:
    """A model that knows two words."""

    name = "tiny"

    def tokenize(self, text):
        return [{"red": 1, "boat": 2}.get(word, 0) for word in text.split()]


def test_unknown_words_are_named_once_and_bounded():
    assert unknown_words(Words(), ["red boat", "red"]) == ""
    assert unknown_words(Words(), ["red dragon, dragon", "boat"]) == "Words that tiny does not know: dragon."
    many = unknown_words(Words(), [" ".join(f"w{i}" for i in range(5000)), "x" * 10_000_000])
    assert many == "Words that tiny does not know: w0, w1, w2 and 997 more."
    assert "..." in unknown_words(Words(), ["x" * 10_000_000]) and len(unknown_words(Words(), ["x" * 10_000_000])) < 100
    assert unknown_words(object(), ["dragon"]) == "", "a model that reads any text"


def test_the_command_line_names_unknown_words_once(cli, tiny_demo):
    answer = cli("compare --device cpu --samplers tar --prompt 'a red qqzz' --prompt 'a qqzz'")
    assert answer.code == 0 and answer.err.count("qqzz") == 1 and "does not know: qqzz." in answer.err


def test_prompts_of_text_encoders_are_one_line_and_hold_words():
    assert prompt_of("  a red\n boat ", "text") == "a red boat"
    for text, words in ((" \n", "it is empty"), ("@somebody #123", ".* addresses, file names and")):
        with pytest.raises(UserError, match=f"^text: {words}"):
            prompt_of(text, "text")


# ------------------------------------------------------------------------------------------------ options


UNUSED = {
    "draft": "--samplers mar --draft demo-draft",
    "grid": "--samplers mar --grid 4",
    "tar": "--samplers mar --tar demo-tar",
    "ta-tok": "--samplers llamagen --ta-tok demo-ta-tok",
    "encoder": "--samplers llamagen --encoder flan-t5-large",
    "negative": "--samplers mar --negative cats",
}


@pytest.mark.parametrize("option", UNUSED)
@pytest.mark.parametrize("command", ["compare", "bench --repeats 1"])
@pytest.mark.fast_cases(
    "compare-draft",
    "bench --repeats 1-grid",
    "bench --repeats 1-tar",
)
def test_an_option_that_no_sampler_uses_is_refused(cli, tiny_demo, sentence, command, option):
    if command != "compare" and option == "negative":
        pytest.skip("bench has no such option")
    line = UNUSED[option]
    device = "--device cpu" if "llamagen" in line else QUICK
    text = sentence(cli(f"{command} {line} {device}"))
    assert text.startswith(f"{option}: no sampler of this run uses this option"), text
    assert text.endswith(f"leave {option} out."), text
    words = shlex.split(line)
    at = words.index(f"--{option}")
    left = shlex.join(words[:at] + words[at + 2 :])
    assert cli(f"{command} {left} {device}").code == 0, "the remedy"


# ------------------------------------------------------------------------------------------------ noise and drafts


def test_noise_of_more_than_four_gigabytes_is_refused(files):
    """4 bytes for 1024 images, 1002 draws, 256 tokens of 16 channels: 16.8 GB. 200 images: 3.3 GB."""
    with torch.device("meta"):
        model = MARModel(official.NETWORKS["MAR-B"]("MAR-B"), "tiny")
    settings = MARSettings(diffusion_steps=1000)
    expect_little_noise(model, settings, 200, "batch")
    for field in ("batch", "condition"):
        with pytest.raises(UserError, match=f"^{field}: the noise of 1024 images .* needs more than 4 GB"):
            expect_little_noise(model, settings, 1024, field)


def test_the_command_line_checks_the_noise(cli, tiny_demo, sentence):
    """4 bytes x 1024 images x 1002 draws x 16 tokens x 4 channels are 0.26 GB on the tiny model;
    its limit is lowered.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batches, "NOISE_LIMIT", 1 << 20)
        line = "compare --device cpu --samplers mar --set steps=2 --set diffusion_steps=1000"
        assert sentence(cli(f"{line} --batch 64")).startswith(
            "batch: the noise of 64 images with 1000 diffusion steps needs more than"
        )


def test_a_draft_of_another_codebook_is_refused(tmp_path, monkeypatch):
    """The file of the draft states another decoder than its target's, whose codes mean something else."""
    vq, other = write_vq(tmp_path / "vq.safetensors"), tmp_path / "other.safetensors"
    loaded = loading.load_vq(vq, "fp32")
    target = Ready(
        LLAMAGEN, load_llamagen(write_gpt(tmp_path / "large.safetensors", 5, 8)), loaded, {"decoder": "vq16-c2i"}
    )
    draft = write_gpt(tmp_path / "low.safetensors", 3, decoder="vq16-t2i")
    asked = []

    def find(choice, family):
        asked.append((choice, family))
        return {str(draft): draft, "vq16-t2i": other}[choice]

    altered = replace(loaded, net=loading.load_vq(vq, "fp32").net)
    with torch.no_grad():
        altered.net.quantize.embedding.weight.neg_()
    for stand_in, fits in ((loaded, True), (altered, False)):
        monkeypatch.setattr(loading, "load_vq", lambda *_, found=stand_in: found)
        drafts = Drafts(Source(find, torch.device("cpu"), "fp32"), str(draft), "large")
        if fits:
            assert drafts.load("mulosd", target) is not None
        else:
            with pytest.raises(UserError, match="^draft: .*; load both models with the same decoder"):
                drafts.load("mulosd", target)
    assert ("vq16-t2i", "vq") in asked
    same = Ready(LLAMAGEN, target.model, loaded, {"decoder": "vq16-t2i"})
    asked.clear()
    assert Drafts(Source(find, torch.device("cpu"), "fp32"), str(draft), "large").load("mulosd", same)
    assert asked == [(str(draft), "llamagen")], "one decoder for both is not loaded again"


# ------------------------------------------------------------------------------------------------ remedies

MAR = "--device cpu --set steps=2 --set diffusion_steps=2"
SMALL = "--samplers mar --repeats 1 --device cpu --set steps=2 --set diffusion_steps=2"
# A command that is refused, words of its message, and the command that follows the remedy.
REMEDIES = [
    (f"compare {MAR} --samplers mar --prompt cat", "name a class with --label",
     f"compare {MAR} --samplers mar --label cat"),
    ("compare --device cpu --samplers tar", "for example --prompt 'a red boat at sunset'",
     "compare --device cpu --samplers tar --prompt 'a red boat at sunset'"),
    (f"compare {MAR} --samplers mar,fasthybrid --set treshold=0.9", "did you mean threshold",
     f"compare {MAR} --samplers mar,fasthybrid --set threshold=0.9"),
    (f"compare {MAR} --samplers mar --maps compare.png", "is already the file for out",
     f"compare {MAR} --samplers mar --maps maps.png"),
    ("compare --device cpu --samplers mar,llamagen --decoder demo-kl", "leave decoder at auto",
     f"compare {MAR} --samplers mar,llamagen --decoder auto"),
    ("compare --device cpu --samplers llamagen --prompt boat --set prompt.detail=81",
     "name a class with --label", "compare --device cpu --samplers llamagen --label boat"),
    (f"bench {SMALL} --set prompt.detail=81", "name a class with --label", f"bench {SMALL}"),
    ("compare --model tar-1.5b --device cpu", "use --model to name the de-tokenizer that generates the image",
     "compare --samplers tar --model demo-dtok-low --tar demo-tar --prompt boat --device cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "words", "followed"), REMEDIES, ids=range(len(REMEDIES)))
@pytest.mark.fast_cases(4)
def test_every_remedy_followed_works(cli, tiny_demo, sentence, refused, words, followed):
    assert words in sentence(cli(refused))
    if followed is not None:
        answer = cli(followed)
        assert answer.code == 0, answer.err
