"""The figures of the docs: what is listed, what is kept, and what is written into a page."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.commands import PROGRAM
from fastar_nodes.lab.docs import blocks, figures
from fastar_nodes.lab.docs.blocks import with_block
from fastar_nodes.lab.docs.figures import Listed, Maker, joined, key, listed, needed, tiny
from fastar_nodes.lab.sweeps.spec import expand
from fastar_nodes.lab.training.captions import held_out, requests, wishes

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261126


@pytest.mark.parametrize("figure", listed().values(), ids=lambda figure: figure.name)
def test_every_figure_has_its_place_and_a_seed_that_chose_nothing(figure):
    page = (ROOT / figure.page).read_text(encoding="utf-8")
    begin, end = blocks.markers(figure.name)
    assert page.count(begin) == page.count(end) == 1
    assert all(command.split()[0] in PROGRAM.commands for command in figure.commands)

    for spec in figure.specs:
        assert expand(spec)
        given = re.findall(r"--seed (\d+)", " ".join(figure.commands))
        assert set(given or [str(spec.seed)]) == {str(SEED)}


def test_no_page_has_a_figure_that_is_not_listed():
    pages = {figure.page for figure in listed().values()}
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages]
    summaries = 1  # of docs/benchmarks.md, made from the others
    assert sum(text.count("<!-- figure ") for text in texts) == 2 * (len(listed()) + summaries)


def test_the_prompts_are_those_that_the_training_left_out():
    lines = (ROOT / "docs" / "benchmarks" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    wanted = wishes(188, SEED)
    assert lines == wanted.captions() and requests(lines) is not None
    names = ("label", "colour", "size", "place", "time")
    for i in range(len(wanted)):
        assert held_out({name: int(getattr(wanted, name)[i]) for name in names})


def test_a_block_replaces_what_is_between_the_markers():
    page = "before\n<!-- figure a: begin -->\nold\n<!-- figure a: end -->\nafter\n"
    assert with_block(page, "a", "new") == page.replace("old", "new")
    for wrong in ("before\n", page.replace("end", "stop"), page + page):
        with pytest.raises(UserError, match="figures: the page of a needs the lines <!-- figure a: begin -->"):
            with_block(wrong, "a", "new")


def test_tables_with_the_same_columns_are_joined():
    one = "On a CPU\n\n| work | s |\n|------|---|\n| MAR  | 1 |\n"
    two = "| work     | s |\n|---|---|\n| LlamaGen | 2 |\n\nnote: none\n"
    assert joined([one, two]) == "| work | s |\n|------|---|\n| MAR  | 1 |\n| LlamaGen | 2 |"
    other = "| cell |\n|---|\n| a |\n"
    assert joined([one, other]).count("\n\n") == 1, "two tables"
    with pytest.raises(UserError, match="printed no table"):
        joined(["nothing\n"])


def figure(*commands: str, name: str = "a") -> Listed:
    return Listed(name, "docs/tables.md", commands, 1)


def test_a_figure_is_made_again_only_if_what_it_depends_on_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    spec = tmp_path / "a.toml"
    spec.write_text('samplers = ["mar"]\nimages = 8\n')
    every = {"a": figure("sweep a.toml --out figures/a/many"), "b": figure("table figures/a/many", name="b")}
    before = {name: key(every[name], every, "code") for name in every}
    assert needed(every["b"], every) == ["a"] and needed(every["a"], every) == []

    assert {name: key(every[name], every, "code") for name in every} == before
    assert key(every["a"], every, "other code") != before["a"]
    longer = {**every, "a": replace(every["a"], commands=("sweep a.toml --images 9 --out figures/a/many",))}
    assert key(longer["b"], longer, "code") != before["b"], "the other figure is part of it"
    models = {"a": replace(every["a"], commands=("presets --models " + "mar-base," * 100,))}
    assert key(models["a"], models, "code") != before["a"], "more than the name of a file can hold"
    spec.write_text('samplers = ["mar"]\nimages = 9\n')
    assert key(every["a"], every, "code") != before["a"]
    with pytest.raises(UserError, match="figures: a reads the folder of c, but c is not in the list"):
        needed(figure("table figures/c/many"), every)


def test_finished_steps_are_not_run_again(tmp_path, monkeypatch):
    """The second step fails once. The first one runs once, and the third one after it."""
    every = {"a": figure("operations", "bench", "operations --batch 2")}
    maker = Maker(every, kept=tmp_path)
    ran = []

    def printed(words):
        ran.append(shlex.join(words))
        if words == ["bench"] and ran.count("bench") == 1:
            raise UserError("stopped")
        return f"| {words[0]} |\n|---|\n| {len(ran)} |\n"

    monkeypatch.setattr(figures, "_printed", printed)
    with pytest.raises(UserError, match="stopped"):
        maker.make("a")
    assert not maker.finished("a")
    maker.make("a")
    maker.make("a")
    assert ran == ["operations", "bench", "bench", "operations --batch 2"] and maker.finished("a")
    block = maker.block("a")
    assert block.startswith(
        "| operations |\n|---|\n| 1 |\n| 4 |\n\n| bench |\n|---|\n| 3 |\n\n*`make figures ONLY=a`; "
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, figure in listed().items() if not needed(figure, listed())])
def test_every_documented_command_runs(name, tmp_path):
    """On two images with few steps; nothing is written into a page."""
    page = (ROOT / "docs" / "tables.md").read_bytes()
    for command, code in tiny([listed()[name]], tmp_path):
        assert code == 0, command
    assert (ROOT / "docs" / "tables.md").read_bytes() == page
