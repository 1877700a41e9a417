"""The command advise on the demo with few steps."""

from fastar_nodes.cli import advise
from fastar_nodes.runs.choice import parse_choice


def test_it_answers_with_lines_that_other_commands_read(cli, tiny_demo, monkeypatch):
    lines = ("fasthybrid: steps=4, diffusion_steps=4", "mar: steps=2, diffusion_steps=4")
    monkeypatch.setattr(advise, "candidates", lambda *_: [parse_choice(line, "sampler") for line in lines])
    answer = cli("advise", "--label", "cat", "--repeats", "1", "--measure", "PSNR", "--least-psnr", "0")
    assert answer.code == 0, answer.err
    (chosen,) = [line.partition(": ")[2] for line in answer.out.splitlines() if line.startswith("text for the node")]
    assert chosen in lines and parse_choice(chosen, "sampler").text == chosen
    (options,) = [line.partition(": ")[2] for line in answer.out.splitlines() if line.startswith("options for compare")]
    again = cli("compare", "--label", "cat", *options.split(), "--set", "steps=2", "--set", "diffusion_steps=2")
    assert again.code == 0, again.err


def test_options_of_the_answer():
    plain = parse_choice("mar", "sampler")
    assert advise._options(plain, plain) == "--samplers mar"
    best = parse_choice("mar: diffusion_steps_end=10", "sampler")
    assert advise._options(plain, best) == "--samplers mar,mar:advised --set mar:advised.diffusion_steps_end=10"
    best = parse_choice("fasthybrid: preset=fast", "sampler")
    assert advise._options(plain, best) == "--samplers mar,fasthybrid --set fasthybrid.preset=fast"


def test_mistakes(cli, tiny_demo):
    for options in (("--least-psnr", "-1"), ("--repeats", "0"), ("--label", "nothing")):
        words = f"{options[0].removeprefix('--').replace('-', '_')}:"
        answer = cli("advise", *options)
        assert answer.code == 2 and words in answer.err and answer.err.count("\n") == 1
