"""Exit codes, help, the progress bar, and the commands that tests do not run."""

import json
from dataclasses import replace

import pytest
import torch
from fastar_nodes.cli import compare, progress
from fastar_nodes.cli.main import COMMANDS
from fastar_nodes.lab.commands import PROGRAM
from fastar_nodes.runs.registry import SAMPLERS


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(cli, name):
    answer = cli(name, "--help")
    assert answer.code == 0 and f"fastar_nodes {name}" in answer.out


def test_no_and_unknown_commands(cli, sentence):
    assert "command" in sentence(cli())
    text = sentence(cli("paint"))
    assert text.startswith("command: there is no command 'paint'") and all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", ["sweep", "evaluate", "train-demo"])
def test_a_command_of_the_lab_is_said_to_be_there(cli, sentence, name):
    assert name in PROGRAM.commands and name not in COMMANDS
    assert "commands of python -m fastar_nodes.lab, in a checkout" in sentence(cli(name, "--help"))


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


def test_the_bar_is_silent_when_it_is_quick_and_shown_when_not(capsys):
    for seconds, shown in ((0, False), (20, True)):
        with progress.Bar("MAR") as bar:
            bar(1, 4, "AR steps")
            bar.start_t -= seconds
            bar.last_print_t -= seconds
            bar(2, 4, "AR steps")
        screen = capsys.readouterr().err
        assert all((words in screen) == shown for words in ("MAR", "2/4", "AR steps")) and bool(screen) == shown


def test_bench_times_several_families_against_their_own_baseline(cli, tiny_demo, tmp_path):
    line = "bench --samplers llamagen,par,mar,zipar --repeats 2 --set steps=2 --set diffusion_steps=4 --set window=2"
    answer = cli(f"{line} --device cpu --json times.json")
    assert answer.code == 0, answer.err
    told = json.loads((tmp_path / "times.json").read_text())
    runs = {run["sampler"]: run for run in told["batches"][0]["runs"]}
    assert list(runs) == ["llamagen", "par", "zipar", "mar"] and told["model"] == "tiny llamagen, tiny par, tiny mar"
    assert runs["llamagen"]["ratio"] == 1.0 and runs["par"]["model"] == "tiny par"
    assert runs["mar"]["ratio"] is None and runs["mar"]["ratio_note"] == "", "nothing is compared with it"
    ratios = sorted(a / b for a, b in zip(runs["llamagen"]["seconds"], runs["par"]["seconds"], strict=True))
    assert runs["par"]["ratio_range"] == pytest.approx(ratios, rel=0.01)
    assert runs["par"]["counts"]["transformer_passes"] == 7 and runs["llamagen"]["counts"]["transformer_passes"] == 16
    heading = next(line for line in answer.out.splitlines() if line.startswith("| batch"))
    assert "sampling" in heading and "passes" in heading and "accepted" not in heading
    rows = {line.split("|")[2].strip(): line for line in answer.out.splitlines() if line.startswith("| 1 ")}
    assert "| baseline " in rows["LlamaGen"] and " in 2 repeats " in rows["PAR"]
    assert "baseline" not in rows["MAR"] and "not compared" not in rows["MAR"]


def test_bench_samples_a_batch_in_parts_and_says_so(cli, tiny_demo, tmp_path, monkeypatch):
    """A device with memory for two images: the times are of the parts."""
    plain, begun = SAMPLERS["mar"], []

    def limited(model, condition, *more, **named):
        begun.append(len(condition))
        if len(condition) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain.run(model, condition, *more, **named)

    monkeypatch.setitem(SAMPLERS, "mar", replace(plain, run=limited))
    few = ("--samplers", "mar", "--repeats", 1, "--set", "steps=2", "--set", "diffusion_steps=4", "--device", "cpu")
    answer = cli("bench", *few, "--batch", "2,4", "--json", "times.json")
    assert answer.code == 0, answer.err
    assert begun == [2] * 2 + [4, 2, 2] * 2  # warm-up and timed run
    whole, parts = (group["runs"][0] for group in json.loads((tmp_path / "times.json").read_text())["batches"])
    said = "Memory was insufficient for 4 images at once, so they were sampled 2 at a time."
    assert parts["note"] == said and parts["counts"]["head_calls"] == 2 * whole["counts"]["head_calls"]
    assert "note" not in whole
    assert answer.out.rstrip().endswith(f"note: MAR, batch 4: {said}")
