"""Exit codes, help, the progress bar, and the commands that tests do not run."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from fastar_nodes.bench import sizes
from fastar_nodes.cli import compare, progress
from fastar_nodes.cli.main import COMMANDS
from fastar_nodes.model_loaders.networks.gpt import GPTConfig
from fastar_nodes.model_loaders.networks.mar import MARConfig
from fastar_nodes.samplers.registry import SAMPLERS


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(cli, name):
    answer = cli(name, "--help")
    assert answer.code == 0 and f"fastar_nodes {name}" in answer.out


def test_no_and_unknown_commands(cli, sentence):
    assert "command" in sentence(cli())
    text = sentence(cli("paint"))
    assert "paint" in text and all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(28, "No space left on device", "compare.png"), 2, "compare.png: No space left on device."),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 2, "memory"),
        (MemoryError(), 2, "memory"),
    ],
)
def test_what_goes_wrong_while_running(cli, monkeypatch, error, code, words):
    def fail(_):
        raise error

    monkeypatch.setattr(compare, "run", fail)
    answer = cli("compare")
    assert answer.code == code and words in answer.err and "Traceback" not in answer.err


def test_our_own_mistakes_are_not_hidden(cli, monkeypatch):
    def fail(_):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(compare, "run", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli("compare")


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_silent_when_it_is_quick_and_draws_when_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    screen, log = _Terminal(), io.StringIO()
    for stream in (screen, log):
        now[0] = 0.0
        with progress.Bar("MAR", stream) as bar:
            bar(1, 4, "AR steps")
            assert stream.getvalue() == ""
            now[0] = 20.0
            bar(2, 4, "AR steps")
            assert (
                "MAR" in stream.getvalue() and "2/4 AR steps" in stream.getvalue() and "20 s left" in stream.getvalue()
            )
            before = stream.getvalue()
            bar(3, 4, "AR steps")
            assert stream.getvalue() == before  # updates are rate-limited
    assert screen.getvalue().endswith("\x1b[K") and "\n" not in screen.getvalue()  # the line is cleared
    assert log.getvalue().count("\n") == 1 and "\r" not in log.getvalue()


def test_benchmark_sizes_are_the_official_ones(mar_fixtures):
    """Compared with the recorded names and shapes of the official files."""
    for size in sizes.SIZES:
        shapes = json.loads((mar_fixtures / f"mar_{size[-1].lower()}_keys.json").read_text())
        state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        assert sizes.official(size) == MARConfig.from_state_dict(state)


@pytest.mark.parametrize(
    "size, file, special",
    [
        *((name, f"c2i_{name.rpartition('-')[2]}", 0) for name in sizes.TOKEN_SIZES),
        ("LlamaGen-XL", "par_XL_4x", sizes.PAR_SPECIAL),
    ],
)
def test_benchmark_sizes_of_tokens_are_the_official_ones(root, size, file, special):
    told = json.loads((root / "tests" / "parity" / "llamagen" / f"keys_{file}.json").read_text())
    state = {name: torch.empty(shape, device="meta") for name, shape in told["keys"].items()}
    assert sizes.official_gpt(size, special) == GPTConfig.from_state_dict(state)


def test_bench_times_several_families_against_their_own_baseline(cli, tiny_demo, tmp_path):
    answer = cli(
        "bench",
        "--samplers",
        "llamagen,par,mar,zipar",
        "--repeats",
        2,
        "--steps",
        2,
        "--set",
        "diffusion_steps=4",
        "--set",
        "window=2",
        "--device",
        "cpu",
        "--json",
        "times.json",
    )
    assert answer.code == 0, answer.err
    told = json.loads((tmp_path / "times.json").read_text())
    runs = {run["sampler"]: run for run in told["batches"][0]["runs"]}
    assert list(runs) == ["llamagen", "par", "zipar", "mar"] and told["model"] == "tiny llamagen, tiny par, tiny mar"
    assert runs["llamagen"]["ratio"] == runs["mar"]["ratio"] == 1.0 and runs["par"]["model"] == "tiny par"
    ratios = sorted(a / b for a, b in zip(runs["llamagen"]["seconds"], runs["par"]["seconds"], strict=True))
    assert runs["par"]["ratio_range"] == pytest.approx(ratios, rel=0.01)
    assert runs["par"]["counts"]["transformer_passes"] == 7 and runs["llamagen"]["counts"]["transformer_passes"] == 16
    heading = next(line for line in answer.out.splitlines() if line.startswith("| batch"))
    assert "sampling" in heading and "passes" in heading and "accepted" not in heading


def test_bench_samples_a_batch_in_parts_and_says_so(cli, tiny_demo, tmp_path, monkeypatch):
    """A device with memory for two images: the times are of the parts, and operations are not counted."""
    plain, begun = SAMPLERS["mar"], []

    def limited(model, condition, *more, **named):
        begun.append(len(condition))
        if len(condition) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain.run(model, condition, *more, **named)

    monkeypatch.setitem(SAMPLERS, "mar", replace(plain, run=limited))
    few = ("--samplers", "mar", "--repeats", 1, "--steps", 2, "--set", "diffusion_steps=4", "--device", "cpu", "--ops")
    answer = cli("bench", *few, "--batch", "2,4", "--json", "times.json")
    assert answer.code == 0, answer.err
    assert begun == [2] * 3 + [4, 2, 2] * 2  # warm-up, timed and counted run; the larger batch is not counted
    whole, parts = (group["runs"][0] for group in json.loads((tmp_path / "times.json").read_text())["batches"])
    said = "Memory was insufficient for 4 images at once; they were sampled 2 at a time."
    assert (
        parts["note"] == said
        and "operations" not in parts
        and parts["counts"]["head_calls"] == 2 * whole["counts"]["head_calls"]
    )
    assert "note" not in whole and whole["operations"] > 0
    assert answer.out.rstrip().endswith(f"note: MAR, batch 4: {said}")


def test_bench_of_random_weights_takes_one_family(cli, sentence):
    text = sentence(cli("bench", "--random", "LlamaGen-B", "--samplers", "llamagen,mar", "--device", "cpu"))
    assert "mar samples a MAR" in text and "LlamaGen-B" in text


def test_bench_checks_before_it_loads(cli, sentence):
    assert "batch" in sentence(cli("bench", "--batch", "1,x"))
    assert "does not have fasthybrid+cspd yet" in sentence(cli("bench", "--samplers", "mar,fasthybrid+cspd"))
    assert "repeats" in sentence(cli("bench", "--repeats", "0"))


def test_train_demo_answers_what_it_cannot_do(cli, sentence, tmp_path):
    assert "jury" in sentence(cli("train-demo", "--only", "jury"))
    assert "train kl first" in sentence(cli("train-demo", "--only", "mar", "--out", "empty", "--device", "cpu"))
    assert "train vq first" in sentence(
        cli("train-demo", "--only", "par,llamagen", "--out", "empty", "--device", "cpu")
    )
    (tmp_path / "file").write_text("x")
    assert "no folder" in sentence(cli("train-demo", "--out", "file", "--device", "cpu"))


def test_only_the_judge_is_stored_outside_the_shipped_checkpoints(root, tmp_path):
    from fastar_nodes.tools.files import checkpoint
    from fastar_nodes.tools.training.command import NAMES

    assert checkpoint("judge") == root / "tools" / "checkpoints" / "judge.safetensors"
    for name in NAMES:
        assert checkpoint(name).is_file() and checkpoint(name, tmp_path) == tmp_path / f"{name}.safetensors"
        assert name == "judge" or checkpoint(name).parent == root / "demo" / "checkpoints"


def test_train_demo_trains_what_was_named(cli, tmp_path):
    from fastar_nodes.model_loaders.mar import load_mar
    from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder
    from fastar_nodes.tools.training import recipes

    torch.manual_seed(0)
    recipes.save_checkpoint(KLAutoencoder(recipes.KL), tmp_path / "out" / "kl.safetensors", family="kl", groups=8)
    answer = cli(
        "train-demo",
        "--only",
        "mar-draft",
        "--out",
        "out",
        "--work",
        "state",
        "--steps",
        1,
        "--pictures",
        64,
        "--device",
        "cpu",
    )
    assert answer.code == 0, answer.err
    assert load_mar(tmp_path / "out" / "mar-draft.safetensors").net.config == recipes.DRAFT
    assert not (tmp_path / "out" / "mar.safetensors").exists()


@pytest.mark.parametrize("improve", [False, True])
def test_train_demo_goes_on_from_an_autoencoder_only_if_asked(cli, tmp_path, monkeypatch, improve):
    from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder
    from fastar_nodes.tools.training import recipes

    there, made = KLAutoencoder(recipes.KL), []
    recipes.save_checkpoint(there, tmp_path / "out" / "kl.safetensors", family="kl", groups=recipes.KL.groups)

    def train_kl(work, out, device, schedule, fine, robust, count, log, start):
        made.append((schedule.steps, fine.steps, robust.steps, count, start))

    monkeypatch.setattr(recipes, "train_kl", train_kl)
    more = ["--improve"] if improve else []
    answer = cli("train-demo", "--only", "kl", "--out", "out", "--steps", 3, "--pictures", 64, "--device", "cpu", *more)
    assert answer.code == 0, answer.err
    [(*told, start)] = made
    assert told == [3, 3, 3, 64] and (start is not None) == improve
    if improve:
        bias = "decoder.conv_out.bias"
        assert torch.equal(start.state_dict()[bias], there.state_dict()[bias].half().float())


def test_train_demo_trains_token_models_in_order(cli, tmp_path, monkeypatch):
    """Order and arguments of the trainings; tests/tools tests the recipes."""
    from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, VQAutoencoder
    from fastar_nodes.model_loaders.networks.gpt import GPT
    from fastar_nodes.tools.training import recipes, reinforce, token_recipes
    from fastar_nodes.tools.training.recipes import save_checkpoint

    made = []
    save_checkpoint(
        KLAutoencoder(recipes.KL), tmp_path / "out" / "kl.safetensors", family="kl", groups=recipes.KL.groups
    )

    def train_vq(work, out, device, schedule, count, log, kl):
        assert kl.config == recipes.KL
        made.append(("vq", schedule.steps, count))
        save_checkpoint(VQAutoencoder(token_recipes.VQ), out, family="vq", groups=token_recipes.VQ.groups)

    def train_gpt(recipe, vq, work, out, device, schedule, count, log, start):
        made.append((recipe.name, schedule.steps, count))
        assert vq.config == token_recipes.VQ and out.name == f"{recipe.name}.safetensors"
        assert (start is not None) == goes_on
        net = GPT(recipe.config)
        token_recipes.save_gpt(recipe, net, out)
        return net

    def train_critic(net, grid, vq, work, device, schedule, count, log):
        made.append(("critic", schedule.steps, count))
        assert net.config == token_recipes.GPT_HIGH.config and grid == 16
        return "critic"

    def learn(recipe, start, vq, critic, work, out, device, schedule, count, log):
        made.append(("its own pictures", schedule.steps, count))
        assert critic == "critic" and start.config == recipe.config and out.name == "llamagen.safetensors"

    monkeypatch.setattr(token_recipes, "train_vq", train_vq)
    monkeypatch.setattr(token_recipes, "train_gpt", train_gpt)
    monkeypatch.setattr(reinforce, "train_critic", train_critic)
    monkeypatch.setattr(reinforce, "reinforce", learn)
    goes_on, few = False, ["--out", "out", "--steps", 3, "--pictures", 64, "--device", "cpu"]
    answer = cli("train-demo", "--only", "par,llamagen,vq,llamagen-low", *few)
    assert answer.code == 0, answer.err
    assert made == [(name, 3, 64) for name in ("vq", "llamagen-low", "llamagen", "critic", "its own pictures", "par")]
    goes_on = True
    made.clear()
    answer = cli("train-demo", "--only", "llamagen,llamagen-low", "--improve", *few)
    assert answer.code == 0, answer.err
    assert made == [(name, 3, 64) for name in ("llamagen-low", "critic", "its own pictures")]


def test_train_demo_trains_tar_in_order(cli, sentence, tmp_path, monkeypatch):
    """Order and arguments of the trainings; tests/tools tests the recipes."""
    from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder
    from fastar_nodes.model_loaders.networks.gpt import GPT
    from fastar_nodes.tools.training import ta_tok_recipe, tar_recipes, token_recipes
    from fastar_nodes.tools.training.recipes import save_checkpoint

    made = []

    def train_ta_tok(work, out, device, schedule, count, log):
        made.append(("ta-tok", schedule.steps, count))
        ta_tok_recipe.save_ta_tok(ta_tok_recipe.build_ta_tok(), out, device, log, 10)

    def train_language(ta_tok, work, out, device, schedule, count, log, start):
        made.append(("tar", schedule.steps, count))
        assert ta_tok.config == ta_tok_recipe.TA_TOK and (start is None) == (not out.exists())
        tar_recipes.save_language(tar_recipes.build_language(), out)

    def train_detokenizer(recipe, ta_tok, vq, work, out, device, schedule, count, log, start):
        made.append((recipe.name, schedule.steps, count))
        assert ta_tok.config == ta_tok_recipe.TA_TOK and vq.config == token_recipes.VQ
        assert out.name == f"{recipe.name}.safetensors" and (start is None) == (not out.exists())
        tar_recipes.save_detokenizer(GPT(recipe.config(ta_tok, vq)), recipe, out)

    monkeypatch.setattr(ta_tok_recipe, "train_ta_tok", train_ta_tok)
    monkeypatch.setattr(tar_recipes, "train_language", train_language)
    monkeypatch.setattr(tar_recipes, "train_detokenizer", train_detokenizer)
    common = ("--out", "out", "--steps", 3, "--pictures", 64, "--device", "cpu")
    assert "train ta-tok first" in sentence(cli("train-demo", "--only", "tar", *common))
    save_checkpoint(
        VQAutoencoder(token_recipes.VQ),
        tmp_path / "out" / "vq.safetensors",
        family="vq",
        groups=token_recipes.VQ.groups,
    )
    assert "train ta-tok first" in sentence(cli("train-demo", "--only", "dtok", *common))
    answer = cli("train-demo", "--only", "dtok,tar,dtok-low,ta-tok", *common)
    assert answer.code == 0, answer.err
    order = [(name, 3, 64) for name in ("ta-tok", "tar", "dtok-low", "dtok")]
    assert made == order
    assert cli("train-demo", "--only", "tar,dtok-low,dtok", "--improve", *common).code == 0
    assert made == order + order[1:]
    (tmp_path / "out" / "vq.safetensors").unlink()
    assert "train vq first" in sentence(cli("train-demo", "--only", "dtok-low", *common))


def test_train_demo_trains_the_hybrid_on_other_checkpoints(cli, sentence, tmp_path, monkeypatch):
    """Arguments of the training and what it needs; tests/tools tests the recipe."""
    from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder
    from fastar_nodes.model_loaders.networks.mar import MAR, initialise
    from fastar_nodes.tools.training import hybrid_recipe, recipes, tar_recipes

    made, out = [], tmp_path / "out"

    def train_hybrid(kl, work, path, device, first, schedule, count, log, start):
        made.append((first and first.steps, schedule.steps, count, start.config == hybrid_recipe.config()))
        hybrid_recipe.save_hybrid(start, path)

    monkeypatch.setattr(hybrid_recipe, "train_hybrid", train_hybrid)
    command = ("train-demo", "--only", "hybrid", "--out", "out", "--steps", 3, "--pictures", 64, "--device", "cpu")
    torch.manual_seed(0)
    assert "train kl first" in sentence(cli(*command))
    recipes.save_checkpoint(KLAutoencoder(recipes.KL), out / "kl.safetensors", family="kl", groups=8)
    assert "train mar first" in sentence(cli(*command))
    recipes.save_checkpoint(
        initialise(MAR(recipes.TARGET)), out / "mar.safetensors", family="mar", heads=4, label_set="picture-book"
    )
    assert "train tar first" in sentence(cli(*command))
    tar_recipes.save_language(tar_recipes.build_language(), out / "tar.safetensors")
    answer = cli(*command)
    assert answer.code == 0, answer.err
    assert cli(*command, "--improve").code == 0, "the first stage is left out"
    assert made == [(3, 3, 64, True), (None, 3, 64, True)]
