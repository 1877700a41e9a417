"""The command dtypes: the same images in several dtypes."""

import pytest
from fastar_nodes.lab.commands import main
from fastar_nodes.lab.experiments import dtypes

FEW = ["dtypes", "--images", "3", "--batch", "2", "--set", "mar.steps=3", "--set", "mar.diffusion_steps=4"]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.slow
def test_fp32_equals_itself_and_8_bits_do_not(capsys):
    assert main([*FEW, "--samplers", "mar,par", "--dtypes", "fp32,fp32,int8"]) == 0
    found = rows(capsys.readouterr().out)
    assert [row[1] for row in found] == ["fp32", "fp32", "fp32", "fp32", "int8", "int8"]
    assert [row[3:] for row in found[:4]] == [["", ""], ["", ""], ["identical", ""], ["identical", "100.0"]]

    assert float(found[4][2]) < 0.6 * float(found[0][2]), "most of a MAR's weights are in its blocks"
    assert 20 < float(found[4][3]) < 60 and found[4][4] == ""
    assert 20 < float(found[5][4]) < 100


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dtypes", "fp32,fp4"], "dtypes: 'fp4' is not one of fp32, "),
        (["--samplers", "mar", "--dtypes", "fp32,int4"], "dtype: FastAR does not offer 4-bit weights for a MAR"),
        (["--dtype", "int8"], "dtype: this command compares several dtypes; name them with --dtypes instead."),
        (["--random", "MAR-B"], "random: an official size with random weights has no decoder; choose a model"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_an_image(options, says, capsys, monkeypatch):
    monkeypatch.setattr(dtypes, "draw", None)
    assert main([*FEW, *options]) == 2
    assert says in capsys.readouterr().err
