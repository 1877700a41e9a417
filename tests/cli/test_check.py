"""The command check: a tiny model of every family, what it refuses before it downloads, and what it writes."""

import gc
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import block_models
import janus_images
import nextstep_models
import pytest
import torch
from fastar_nodes.cli import checks, machine, subject
from fastar_nodes.cli.checks import DIFFERS, FAILED, MARGIN, MEASURED, NOT_MEASURED, PASS
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub, official
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.reports.table import literal
from fastar_nodes.runs import loading
from fastar_nodes.runs.registry import BITDANCE, HYBRID, JANUS, LLAMAGEN, MAR, NEXTSTEP, SAMPLERS, TAR
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
OPTIONS = ("--device", "cpu")
# Lines of a model that draws, before those of its other samplers; and of a part of one.
OF_A_MODEL = [
    *("files", "names and shapes", "dtype", "memory of the weights", "seconds to load"),
    *("image", "memory of an image"),
]
READING = ["vision tower", "answer", "memory of an answer"]
OF_A_PART = [*OF_A_MODEL[:5], "first evaluation"]


def titles(family, *without):
    """Titles of the samplers of a family's models."""
    return [entry.title for name, entry in SAMPLERS.items() if family in entry.families and name not in without]


def checked(cli, *arguments):
    """The answer of the command, and the lines in its JSON file by name."""
    answer = cli("check", *arguments, *OPTIONS)
    lines = json.loads(Path("check.json").read_text(encoding="utf-8"))["lines"]
    return answer, {line["check"]: line for line in lines}


@pytest.mark.parametrize(
    ("kind", "options", "samplers"),
    [
        ("mar", "--decoder {kl}", titles(MAR)),
        pytest.param("hybrid", "--decoder {kl} --prompt red", titles(HYBRID), marks=pytest.mark.slow),
        ("llamagen", "--decoder {vq}", titles(LLAMAGEN, "par")),
        pytest.param("par", "--decoder {vq}", ("PAR",), marks=pytest.mark.slow),
        pytest.param(
            *("low", "--decoder {vq} --tar {tar} --ta-tok {ta_tok} --prompt red", titles(TAR)),
            marks=pytest.mark.slow,
        ),
        pytest.param("janus", "--prompt red", titles(JANUS), marks=pytest.mark.slow),
        ("bitdance", "--label 1", titles(BITDANCE)),
        pytest.param("bitdance of prompts", "--prompt red", titles(BITDANCE), marks=pytest.mark.slow),
        pytest.param("nextstep", "--prompt red", titles(NEXTSTEP), marks=pytest.mark.slow),
    ],
)
def test_a_tiny_model_of_every_family(cli, files, tmp_path, kind, options, samplers):
    """Each line holds, or gives a figure; an accelerator's seconds are beside the plain sampler's."""
    others = {
        "janus": lambda: janus_images.one_file(tmp_path / "j.safetensors", "Janus-Pro"),
        "bitdance": lambda: block_models.one_file(tmp_path / "b.safetensors"),
        "bitdance of prompts": lambda: block_models.FOLDER / "native",
        "nextstep": lambda: nextstep_folder(tmp_path, "NextStep-1.1-Pretrain-256px"),
    }
    model = others[kind]() if kind in others else getattr(files, kind)
    answer, lines = checked(cli, "--model", model, *options.format(**files._asdict()).split())

    assert answer.code == 0, answer
    reads = READING if kind == "janus" else []
    assert list(lines) == [*OF_A_MODEL, *(f"seconds of {name}" for name in samplers), *reads]
    for name in ("files", "memory of the weights", "image", "memory of an image"):
        assert lines[name]["result"] in (PASS, NOT_MEASURED if sys.platform != "linux" else PASS), lines[name]
    stored = "bf16" if kind in ("janus", "bitdance of prompts", "nextstep") else "fp32"
    assert lines["dtype"]["figures"] == {"stored": stored, "loaded": "fp32"}
    for name in samplers:
        line = lines[f"seconds of {name}"]
        # No draft model; and 16 tokens are too few for GtR's 17 AR steps.
        (entry, *_) = [entry for entry in SAMPLERS.values() if entry.title == name]
        absent = entry.needs_draft or "GtR" in name
        assert line["result"] == (NOT_MEASURED if absent else MEASURED), line
        assert ("one run each" in line["found"]) == (not absent and name != samplers[0])

    assert Path("check.png").stat().st_size > 50
    for name, line in lines.items():
        assert f"| {name} " in answer.out and line["found"]
    assert answer.out.count("\n") < 25 and max(map(len, answer.out.splitlines())) < 120, "it fits a screen"


@pytest.mark.parametrize("name", ["Janus-4o", "Janus-Pro-7B"])
def test_a_model_that_reads_images(cli, tmp_path, name):
    """Its tower, an answer, and of a model that edits the memory of an edit."""
    path = janus_images.one_file(tmp_path / "j.safetensors", name)
    answer, lines = checked(cli, "--model", path, "--quick")
    assert answer.code == 0, answer
    edit = ["memory of an edit"] if name == "Janus-4o" else []
    assert list(lines)[7:] == [*READING, *edit]
    assert lines["vision tower"]["found"] == "48,432 weights in 41 tensors"
    assert lines["answer"]["figures"]["text"]
    for line in ("memory of an answer", *edit):
        assert lines[line]["result"] == (PASS if sys.platform == "linux" else NOT_MEASURED), lines[line]


def nextstep_folder(folder: Path, name: str) -> Path:
    """A tiny NextStep of this name, by which its images are of 16 x 16 tokens, or it edits."""
    (folder / name).symlink_to(nextstep_models.FOLDER / "model")
    return folder / name


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_nextstep_that_edits(cli, tmp_path, dtype):
    """It has no tower and no answer: its decoder reads the image. In 4 bits the blocks alone are rounded."""
    path = nextstep_folder(tmp_path, "NextStep-1-Large-Edit-256px")
    answer, lines = checked(cli, "--model", path, "--quick", "--dtype", dtype)
    assert answer.code == 0, answer
    assert list(lines) == [*OF_A_MODEL[:5], "first step", "memory of a step", "memory of an edit"]
    assert lines["memory of an edit"]["result"] == (PASS if sys.platform == "linux" else NOT_MEASURED), lines
    assert lines["dtype"]["found"] == f"bf16, loaded as {dtype}"


def test_one_step_in_place_of_the_images(cli, files):
    answer, lines = checked(cli, "--model", files.mar, "--decoder", files.kl, "--quick")
    assert answer.code == 0 and list(lines) == [*OF_A_MODEL[:5], "first step", "memory of a step"]
    assert not Path("check.png").exists()


@pytest.fixture
def entry(files, tmp_path, monkeypatch):
    """Lists a tiny KL autoencoder, which is here, in the catalogue; gives a function that changes its entry."""
    folder = tmp_path / "models"
    folder.mkdir()
    content = files.kl.read_bytes()
    (folder / "tiny.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    about = {
        "id": "tiny",
        "family": "kl",
        "file": "tiny.safetensors",
        "repo": "a/b",
        "revision": None,
        "sha256": digest,
    }
    about |= {"size": len(content), "licence": "MIT", "decoder": None, "network": "tiny", "dtype": "fp32"}
    config = KLConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=4, groups=4)
    monkeypatch.setitem(official.NETWORKS, "tiny", lambda name: KLAutoencoder(config))

    def change(**changes):
        monkeypatch.setattr(hub, "catalogue", lambda: (hub.Entry(**{**about, **changes}),))
        return folder

    return change


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"sha256": "0" * 64}, "sha256"),
        ({"network": "VQ-8"}, "names and shapes"),
        ({"network": "KL-16"}, "names and shapes"),
        ({"dtype": "bf16"}, "dtype"),
    ],
)
@pytest.mark.fast_cases(3)
def test_an_entry_beside_the_catalogue(cli, entry, changes, wrong):
    folder = entry(**changes)
    answer = cli("check --model tiny --device cpu --models", folder)
    lines = {line["check"]: line for line in json.loads(Path("check.json").read_text())["lines"]}
    named = ("files", "sha256", "names and shapes", "dtype")
    assert [name for name in named if lines[name]["result"] != PASS] == [wrong] * bool(wrong)
    assert answer.code == bool(wrong)


def test_the_shards_of_an_index_are_files_of_the_entry(entry, tmp_path):
    """Of a model whose weight files the catalogue does not name."""
    index = "model.safetensors.index.json"
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    texts = {"config.json": "{}", index: json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}})}
    for name, text in {**texts, shards[0]: "1", shards[1]: "22"}.items():
        (tmp_path / name).write_text(text)

    entry(family="janus", parts={"config.json": None, f"{index}?": None, "model.safetensors?": None}, sha256=None)
    (listed,) = hub.catalogue()
    source = SimpleNamespace(find=lambda *_: tmp_path)
    line, _ = checks.files(SimpleNamespace(subject=subject.Subject("tiny", "janus", listed), files=source))

    assert line.expected == "the 3 files in the catalogue" and line.found.startswith("3 files, ")
    assert line.figures["bytes"] == sum(map(len, texts.values())) + 3


@pytest.mark.parametrize("kind", ["kl", "vq", "tar", "ta_tok", "bits"])
@pytest.mark.fast_cases("kl", "tar", "bits")
def test_a_part_of_a_model(cli, files, kind):
    path = block_models.FOLDER / "native" / "ae.safetensors" if kind == "bits" else getattr(files, kind)
    answer, lines = checked(cli, "--model", path, "--prompt", "red")
    assert answer.code == 0, answer
    assert list(lines)[:6] == OF_A_PART and lines["first evaluation"]["result"] == PASS
    assert not Path("check.png").exists()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_rounded_to_8_bits_are_called_so(cli, files, kind):
    """The scales are no weights of the network."""
    plain, eight = (
        checked(cli, "--model", files.llamagen, "--decoder", files.vq, "--dtype", dtype, "--quick")[1]
        for dtype in ("fp32", kind)
    )
    assert eight["dtype"]["found"] == f"fp32, loaded as {kind}"
    assert eight["dtype"]["figures"] == {"stored": "fp32", "loaded": kind}
    assert eight["names and shapes"]["found"] == plain["names and shapes"]["found"]


def test_a_constant_image_ends_with_code_1(cli, files, monkeypatch):
    monkeypatch.setattr(checks, "_CONTRAST", 255)
    answer, lines = checked(cli, "--model", files.llamagen, "--decoder", files.vq)
    assert answer.code == 1 and lines["image"]["result"] == DIFFERS and lines["image"]["found"].endswith(", constant")
    assert "not as expected: image." in answer.out
    assert lines["seconds of ZipAR"]["result"] == MEASURED, "the others went on"


def test_weights_that_are_not_finite(cli, files, tmp_path):
    """The sentence is the last line, and stands below the table, whose width it would exceed."""
    state = load_file(files.kl)
    next(iter(state.values())).view(-1)[0] = math.nan
    save_file(state, tmp_path / "broken.safetensors", metadata={"groups": "4"})
    answer, lines = checked(cli, "--model", tmp_path / "broken.safetensors")
    assert answer.code == 1 and list(lines) == ["files", "loading"] and lines["loading"]["result"] == FAILED
    said = lines["loading"]["found"]
    assert "NaN or infinite weights in" in said
    assert "| loading | see below " in answer.out and f"\nloading: {literal(said, 400)}\n" in answer.out


def test_what_a_step_raises_is_the_last_line(cli, files, monkeypatch):
    """The file for an issue is written, whatever a model raises on an unknown machine."""

    def broken(planned, condition):
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(checks, "warm_up", broken)
    answer, lines = checked(cli, "--model", files.llamagen, "--decoder", files.vq)
    assert answer.code == 1 and list(lines) == [*OF_A_MODEL[:5], "image"]
    assert lines["image"]["found"] == "ZeroDivisionError: a fault" and lines["image"]["result"] == FAILED


def test_a_sampler_without_memory_for_its_draft_is_not_measured(cli, files, monkeypatch):
    beside = loading.beside

    def full(entry, on, drafts):
        if entry.name == "zipar":
            raise UserError("memory: there is too little.")
        return beside(entry, on, drafts)

    monkeypatch.setattr(checks, "beside", full)
    answer, lines = checked(cli, "--model", files.llamagen, "--decoder", files.vq)
    assert answer.code == 0 and lines["seconds of ZipAR"]["result"] == NOT_MEASURED
    assert lines["seconds of ZipAR"]["found"] == "memory: there is too little."


def test_ctrl_c_keeps_what_was_found(cli, files, monkeypatch):
    def stopped(planned, condition, seed):
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "draw", stopped)
    answer, lines = checked(cli, "--model", files.llamagen, "--decoder", files.vq)
    assert answer.code == 130 and lines["image"]["found"] == "stopped" and lines["files"]["result"] == PASS


# ------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def offline(monkeypatch):
    """A download fails the test."""
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("something was downloaded"))


@pytest.mark.parametrize(
    ("model", "options", "names", "need"),
    [
        # The bytes of the files that the catalogue states: 831,736,456 + 265,856,244.
        ("mar-base", "", "mar-base, kl16", "1.10 GB"),
        # 3,111,800,170 + 287,920,306 + 11,399,097,584.
        ("llamagen-t2i-xl-256", "", "llamagen-t2i-xl-256, vq16-t2i, flan-t5-xl", "14.80 GB"),
        # The encoder is not needed for a step with random features.
        ("llamagen-t2i-xl-256", "--quick", "llamagen-t2i-xl-256, vq16-t2i", "3.40 GB"),
        # 654,241,280 weights in fp32, which no record states, 287,920,306, 3,287,938,048 and 147,308,544 in fp32.
        ("ar-dtok-256", "", "ar-dtok-256, vq16-t2i, tar-1.5b, ta-tok", "6.78 GB"),
        ("harmon-1.5b", "", "harmon-1.5b, qwen2.5-tokenizer, kl16", "5.26 GB"),
        # The autoencoder is in the file: 260,102,432 and 460,294,179 numbers in fp32.
        ("bitdance-b-4x", "", "bitdance-b-4x", "2.88 GB"),
    ],
)
def test_a_disk_without_room_is_named_before_the_download(
    cli, sentence, offline, monkeypatch, tmp_path, model, options, names, need
):
    monkeypatch.setattr(subject, "free_space", lambda folder: 500_000_000)
    said = sentence(cli(f"check --model {model} --device cpu {options} --models", tmp_path))
    assert said.startswith(f"models: the downloads of {names} need {need}, but only 500 MB are free on the disk of ")


def test_what_has_arrived_needs_no_room(cli, offline, monkeypatch, tmp_path):
    """Of 266 MB 166 are here."""
    with (tmp_path / ".kl16.safetensors.ae6e66b66cce6424.part").open("wb") as part:
        part.truncate(166_000_000)
    monkeypatch.setattr(subject, "free_space", lambda folder: 99_000_000)
    entry = ("kl16", "kl")
    with pytest.raises(UserError, match="the downloads of kl16 need 100 MB, but only 99 MB are free"):
        subject.expect_disk([entry], tmp_path)
    monkeypatch.setattr(subject, "free_space", lambda folder: 100_000_000)
    subject.expect_disk([entry], tmp_path)


def test_too_little_memory_is_named_before_the_download_and_the_remedy_helps(
    cli, sentence, offline, monkeypatch, tmp_path
):
    """MAR-H has 942,403,104 weights."""
    monkeypatch.setattr(subject, "free_memory", lambda device: 2_000_000_000)
    said = sentence(cli("check --model mar-huge --device cpu --models", tmp_path))
    assert said == (
        "memory: the weights of mar-huge need 3.77 GB in fp32 on cpu, but only 2.00 GB are free; choose --dtype "
        "bf16, which needs 1.88 GB."
    )
    with pytest.raises(pytest.fail.Exception, match="downloaded"):
        cli("check --model mar-huge --device cpu --dtype bf16 --models", tmp_path)

    monkeypatch.setattr(subject, "free_memory", lambda device: 1_000_000_000)
    said = sentence(cli("check --model mar-huge --device cpu --models", tmp_path))
    assert said.endswith("close other programs, or choose a smaller model or a different --device.")


# ------------------------------------------------------------------------------------------------ the JSON file


def test_the_file_for_an_issue_says_what_ran_and_not_who(cli, files, tmp_path, monkeypatch):
    home = tmp_path / "Jane Doe"
    (home / "models").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    model = home / "models" / "mine.safetensors"
    model.write_bytes(Path(files.mar).read_bytes())
    cli("check", "--model", model, "--decoder", home / "models" / "absent.safetensors", *OPTIONS)
    text = Path("check.json").read_text(encoding="utf-8")
    found = json.loads(text)

    assert "Jane" not in text and str(tmp_path) not in text
    assert found["model"] == "mine.safetensors" and found["family"] == "mar"
    failed = {line["check"]: line["found"] for line in found["lines"] if line["result"] == FAILED}
    assert "absent.safetensors" in failed["loading"], "the sentence says which file"
    about = found["environment"]
    assert about["fastar"] == "0.1.0" and about["packages"]["torch"] == torch.__version__
    assert about["device"]["type"] == "cpu" and about["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("put it into /home/jane doe/models/a.pt, or", "put it into <home>/models/a.pt, or"),
        ("no file /mnt/disk of jane/b.pt", "no file <folder 1>/b.pt"),
        ("no file /srv/x/c.pt; get", "no file <path>/c.pt; get"),
        (r"no file D:\Models\sub\b.pt; get", "no file <path>/b.pt; get"),
        ("the ratio 3/4 of 16x16, and/or https://huggingface.co/a/b", None),
        ("transformer 0.27, head 0.87", None),
    ],
)
def test_paths_become_their_last_part(text, expected, monkeypatch):
    monkeypatch.setattr(machine.Path, "home", lambda: Path("/home/jane doe"))
    folders = machine.private_folders(None, ("/mnt/disk of jane/b.pt", "mar-base"))
    found = machine.anonymous({"lines": [text, 3]}, folders)
    assert found == {"lines": [text if expected is None else expected, 3]}


def test_what_is_known_of_a_cuda_device(monkeypatch):
    class About:
        name, major, minor, total_memory = "NVIDIA GeForce RTX 3060", 8, 6, 12 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: About)
    monkeypatch.setattr(machine, "_DRIVER", Path("nowhere"))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12040, raising=False)
    found = machine.environment(torch.device("cuda"))["device"]
    assert found["name"] == "NVIDIA GeForce RTX 3060" and found["capability"] == "8.6"
    assert found["memory_bytes"] == 12884901888 and found["driver"] == "CUDA 12.4"


def test_the_driver_is_read_where_linux_states_it(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5 UTC 2024\n")
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    assert machine._driver() == "550.54.15"


# ------------------------------------------------------------------------------------------------ parts


def test_memory_beyond_the_estimate_is_a_fault():
    need = 100_000_000
    found = (need, need + MARGIN, need + MARGIN + 1)
    assert [checks._memory("m", machine.Peak(n), need).result for n in found] == [PASS, PASS, DIFFERS]

    on_gpu = [machine.Peak(n + need // 100, unused=0.01) for n in found]
    assert [checks._memory("m", peak, need).result for peak in on_gpu] == [PASS, PASS, DIFFERS]

    assert checks._memory("m", machine.Peak(None, "nobody knows"), need).result == NOT_MEASURED


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the memory that no file backs")
def test_the_growth_of_memory_is_measured():
    gc.collect()  # of what other tests left, which would hide the growth
    with machine.watched(torch.device("cpu")) as peak:
        held = torch.ones(30_000_000)
        time.sleep(0.5)  # the memory is looked at now and then
    assert held.all()
    assert 110_000_000 < peak.bytes < 200_000_000


def test_differences_of_names_and_shapes():
    right = {"a": (2, 3), "b": (4,)}
    assert checks.differences(right, dict(right)) == ""
    assert checks.differences(right, {"a": (2, 3)}) == "b is missing"
    assert checks.differences(right, {"a": (3, 2), "b": (4,)}) == "a is 3x2, not 2x3"
    assert checks.differences(right, {**right, "c": (1,)}) == "c is not one of its weights"


# ------------------------------------------------------------------------------------------------ published networks


# Recorded names and shapes of official files, and what of them an image does not need.
RECORDED = {
    "MAR-B": ("mar/mar_b_keys", ()),
    "MAR-L": ("mar/mar_l_keys", ()),
    "MAR-H": ("mar/mar_h_keys", ()),
    "KL-16": ("mar/kl16_keys", ()),
    "VQ-16": ("vq/keys_vq_16", ("quantize.codebook_used",)),
    "VQ-8": ("vq/keys_vq_8", ("quantize.codebook_used",)),
    "LlamaGen-B": ("llamagen/keys_c2i_B", ()),
    "LlamaGen-L": ("llamagen/keys_c2i_L", ()),
    "LlamaGen-XL": ("llamagen/keys_c2i_XL", ()),
    "LlamaGen-XXL": ("llamagen/keys_c2i_XXL", ()),
    "LlamaGen-3B": ("llamagen/keys_c2i_3B", ()),
    "LlamaGen-XL-T2I": ("llamagen/keys_t2i_XL", ()),
    "PAR-XL-4x": ("llamagen/keys_par_XL_4x", ()),
    "PAR-XXL-4x": ("llamagen/keys_par_XXL_4x", ()),
    "PAR-3B-4x": ("llamagen/keys_par_3B_4x", ()),
    "PAR-3B-16x": ("llamagen/keys_par_3B_16x", ()),
}


@pytest.mark.fast_cases("MAR-B", "KL-16", "VQ-16", "LlamaGen-B", "LlamaGen-XL-T2I", "PAR-3B-16x")
@pytest.mark.parametrize("name", RECORDED)
def test_published_names_and_shapes_are_the_recorded_ones(name):
    path, unread = RECORDED[name]
    recorded = json.loads((ROOT / "tests" / "parity" / f"{path}.json").read_text())
    recorded = recorded.get("keys", recorded)
    assert official.shapes(name) == {
        k: tuple(shape) for k, shape in recorded.items() if not k.startswith(unread or "?")
    }


def test_every_download_names_its_network():
    for entry in subject.all_entries():
        if entry.built_in or entry.family == "tokenizer":
            assert not entry.network
        else:
            assert entry.network in official.NETWORKS, entry.id
            assert entry.dtype in ("", "fp32", "bf16")
    # Weights of the language models of the paper (test_qwen_network.py), and of MAR-B's recorded keys.
    known = {"tar-1.5b": 1_643_969_024, "tar-7b": 8_082_554_368, "mar-base": 207_924_768}
    assert {e.id: subject.parameters(e) for e in subject.all_entries() if e.id in known} == known
