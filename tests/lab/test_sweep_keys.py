"""Keys of a sweep's cells hold everything that decided the images, also what is not there yet."""

from dataclasses import fields, make_dataclass, replace

import pytest
from fastar_nodes.lab.sweeps import work
from tiny_files import write_gpt, write_vq
from tiny_sweeps import begin, finish, table

# Entries of a spec for a sampler with a draft model.
DRAFTED = {"samplers": ["mulosd"], "set": {"mulosd.tau": 0.3}, "images": 2}


def with_field(record, value):
    """A model's record as a later version may have it, with one field more."""
    kind = make_dataclass("Later", [("twist", float)], bases=(type(record),), frozen=True, eq=False, kw_only=True)
    return kind(**{f.name: getattr(record, f.name) for f in fields(record)}, twist=value)


def keys_of(tmp_path, name: str, entries: dict) -> set[str]:
    return {cell.key for cell in begin(tmp_path / name, entries)[1]}


@pytest.mark.parametrize("part", ["model", "decoder"])
def test_a_new_field_of_a_models_record_is_in_the_key(files, tmp_path, monkeypatch, part):
    load = work.load

    def found(name: str, twist: float) -> set[str]:
        def later(*given):
            ready = load(*given)
            return replace(ready, **{part: with_field(getattr(ready, part), twist)})

        monkeypatch.setattr(work, "load", later)
        return keys_of(tmp_path, name, table(files))

    first = found("first", 1.0)
    assert first == found("again", 1.0) and first.isdisjoint(found("other", 2.0))


def test_what_the_loader_decided_of_a_draft_model_is_in_the_key(tmp_path, monkeypatch):
    target, vq = write_gpt(tmp_path / "large.safetensors", 3, 8), write_vq(tmp_path / "vq.safetensors")
    small = write_gpt(tmp_path / "small.safetensors", 4, 4)
    entries = {"model": str(target), "decoder": str(vq), "draft": str(small), "threads": 1, **DRAFTED}
    load = work.Drafts.load
    first = keys_of(tmp_path, "first", entries)
    monkeypatch.setattr(work.Drafts, "load", lambda *given: with_field(load(*given), 1.0))
    assert first.isdisjoint(keys_of(tmp_path, "other", entries))


def test_finished_shards_are_found_where_other_values_vary(files, tmp_path):
    """A single threshold is in no cell's name, two are; the images are the same."""
    few = {"steps": 2, "diffusion_steps": 2, "fasthybrid.lookahead": 1}
    about = {"images": 2, "labels": ["cat"]}
    _, drawn = finish(tmp_path, table(files, **about, set={**few, "fasthybrid.threshold": 0.5}))
    assert len(drawn) == 2
    store, drawn = finish(tmp_path, table(files, **about, set={**few, "fasthybrid.threshold": [0.5, 0.9]}))
    assert [cell.title for cell in store.cells()] == [
        "MAR",
        "FastHybrid, threshold 0.5",
        "FastHybrid, threshold 0.9",
    ]
    assert [name for name, _ in drawn] == [store.cells()[2].id], "the new one alone"
    assert all(cell.baseline == store.cells()[0].id for cell in store.cells()[1:])
