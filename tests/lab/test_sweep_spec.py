"""Specs of sweeps: what they ask for, and what is refused before anything is loaded."""

import json
import sys

import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.spec import expand, from_table, read_spec

pytestmark = pytest.mark.slow

BASE = {"samplers": ["mar", "fasthybrid", "zipar"]}


def titles(**entries):
    return [c.title for c in expand(from_table({**BASE, **entries}))]


def test_a_list_makes_a_grid():
    found = titles(set={"fasthybrid.threshold": [0.9, 0.99], "fasthybrid.lookahead": [2, 4], "cfg": 2})
    values = [f"FastHybrid, threshold {a}, lookahead {b}" for a in (0.9, 0.99) for b in (2, 4)]
    assert found == ["MAR", *values, "ZipAR"]
    assert titles(set={"cfg": [1, 2]}) == [f"{n}, cfg {c}" for n in ("MAR", "FastHybrid", "ZipAR") for c in (1, 2)]
    found = titles(samplers=["mar", "mar:disa"], set={"mar:disa.diffusion_steps_end": [5, 10]})
    assert found == ["MAR", *(f"MAR, disa, diffusion steps end {n}" for n in (5, 10))]


def test_settings_go_to_the_samplers_that_have_them():
    combinations = expand(from_table({**BASE, "set": {"cfg": 2, "steps": 8, "zipar.window": 3, "zipar.cfg": 4}}))
    masked = {"cfg": 2, "steps": 8}
    assert [dict(c.asked) for c in combinations] == [masked, masked, {"cfg": 4, "window": 3}]


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(
        'model = "demo"\nsamplers = ["mar", "fasthybrid"]\nimages = 5\n'
        "[set]\nfasthybrid.threshold = [0.9, 1]\ncfg = 2.5\n"
    )
    entries = {"samplers": "mar, fasthybrid", "images": 5, "set": {"fasthybrid": {"threshold": [0.9, 1]}, "cfg": 2.5}}
    (tmp_path / "a.json").write_text(json.dumps(entries))
    from_json = read_spec(tmp_path / "a.json")
    assert from_json.set == {"fasthybrid.threshold": (0.9, 1), "cfg": (2.5,)} and from_json.images == 5
    if sys.version_info >= (3, 11):
        assert read_spec(tmp_path / "a.toml") == from_json


def test_prompts_are_the_lines_of_a_text(tmp_path):
    (tmp_path / "p.txt").write_text("a red boat\n\n a cat \n")
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "prompts": "p.txt"}))
    assert read_spec(tmp_path / "a.json").prompts == ("a red boat", "a cat")


# Words of the refusal, and entries.
BAD = {
    "samplers": [{"samplers": []}, {"samplers": [3.5]}],
    "'vroom'": [{"samplers": ["vroom"]}, {"set": {"vroom.x": 1}}],
    "images": [{"images": "many"}, {"images": True}],
    "choose one of model, ": [{"imges": 5}],
    "did you mean threshold": [{"set": {"treshold": 1}}],
    "window": [{"set": {"fasthybrid.window": 1}}],
    "lazymar": [{"set": {"lazymar.refresh_period": 1}}],
    "1 to 256 numbers": [{"set": {"fasthybrid.threshold": []}}],
    "fasthybrid.threshold": [{"set": {"fasthybrid.threshold": [[1]]}}, {"set": {"fasthybrid.threshold": 7}}],
    "preset: 'quick'": [{"set": {"fasthybrid.preset": "quick"}}],
    "256": [{"set": {"cfg": list(range(1, 500))}}],
    "1024 cells": [{"set": {"guided_steps": list(range(40)), "lookahead": list(range(40))}}],
    "prompt": [{"set": {"prompt.detail": [81, 169]}}],
    "detail": [{"set": {"prompt.detail": 5}}],
    "prompts": [{"prompts": []}],
    "prompts: .*1": [{"prompts": [" "]}, {"prompts": [{"text": "x"}]}],
}
OTHER_TYPES = {"model": ["demo"], "batch": 0, "seed": -1, "dtype": "fp4", "draft": 5, "set": [1]}
BAD |= {name: [{name: value}] for name, value in OTHER_TYPES.items()}


@pytest.mark.parametrize(("names", "entries"), [(n, e) for n, several in BAD.items() for e in several], ids=str)
def test_bad_specs_are_refused_in_a_sentence(entries, names):
    with pytest.raises(UserError, match=names):
        from_table({**BASE, **entries})


FILES = [("a.toml", b"samplers = ["), ("a.toml", b"\xff\xfe"), ("a.json", b"[1]"), ("a.json", b"[" * 100_000)]
FILES += [("a.json", b'{"samplers": ["mar"], "prompts": "%s"}' % name) for name in (b"none.txt", b"a.json/x")]


@pytest.mark.parametrize(("name", "content"), FILES, ids=lambda v: str(v)[:20])
def test_bad_files_are_refused_in_a_sentence(tmp_path, name, content):
    if name.endswith("toml") and sys.version_info < (3, 11):
        pytest.importorskip("tomli")
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path / "none.toml", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UserError):
            read_spec(path)


def test_settings_after_a_colon_are_settings_in_a_spec_too():
    """In a list an entry is a whole sampler; a text with commas is read as --samplers."""
    for samplers in (["mar", "zipar: window=2, parallel=4", "mar:32, label"], "mar,zipar:window=2,parallel=4"):
        _, zipar, *rest = expand(from_table({"samplers": samplers}))
        assert dict(zipar.asked) == {"window": "2", "parallel": "4"} and dict(zipar.choice.values) == zipar.asked
        assert zipar.title == "ZipAR, window 2, parallel 4" and zipar.choice.preset == "custom"
        assert [c.title for c in rest] == (["MAR, 32, label"] if isinstance(samplers, list) else [])
    grid = expand(from_table({"samplers": ["zipar:window=2"], "set": {"parallel": [2, 4]}}))
    assert [c.title for c in grid] == [f"ZipAR, window 2, parallel {n}" for n in (2, 4)]
    for wrong, set_ in (("zipar:windo=2", {}), ("zipar:window=2", {"zipar:window=2.window": 3})):
        with pytest.raises(UserError, match="window"):
            from_table({"samplers": [wrong], "set": set_})
