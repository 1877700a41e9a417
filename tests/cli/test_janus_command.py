"""Janus on the command line: its file is identified, and prompts of a run are one batch."""

import pytest
from janus_files import one_file


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(one_file(tmp_path_factory.mktemp("janus") / "tiny.safetensors"))


def test_the_usual_samplers_of_a_janus_and_several_prompts(cli, path):
    line = "compare --device cpu --prompt cat --prompt moon"
    done = cli(line, "--model", path)
    assert done.code == 0 and "LlamaGen" in done.out and "ZipAR" in done.out
    assert cli(f"{line} --samplers llamagen --set llamagen.parallel=4", "--model", path).code == 0


OPTIONS = {"--samplers par": "samplers: par", "--samplers mulosd": "samplers: mulosd", "--grid 8": "grid: "}
OPTIONS |= {"--negative x": "negative: ", "--label 3": "label: "}


@pytest.mark.parametrize(("options", "found"), OPTIONS.items())
@pytest.mark.fast_cases(3)
def test_what_does_not_apply(cli, path, options, found):
    prompt = "" if "label" in options else "--prompt cat"
    done = cli(f"compare --device cpu {prompt} {options}", "--model", path)
    assert done.code == 2 and found in done.err
