"""The command table: one row a cell, from one folder or several."""

import made_sweeps
import pytest
from fastar_nodes.errors import UserError
from fastar_nodes.lab.sweeps.measures import Means, evaluate
from fastar_nodes.lab.sweeps.store import Store
from fastar_nodes.lab.sweeps.table import columns_of, read, table


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Store:
    store = made_sweeps.write(tmp_path_factory.mktemp("many"))
    evaluate(store, ["identical"], Means(resamples=20))
    return store


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Store:
    """The same cells, of 8 images each."""
    return made_sweeps.write(tmp_path_factory.mktemp("few"), images=8)


def cells(text: str) -> list[list[str]]:
    """The cells of a Markdown table, without the rule below its head."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


def test_work_and_measures_of_a_folder(many):
    """Of made_sweeps: 1000, 250, 400, 900 and 600 calls of a shard, a thousandth of a second each."""
    found = cells(table([read(many)], ["speedup", "head-calls", "identical"]))
    assert found == [
        ["cell", "speed-up, batch 8", "head calls, batch 8", "identical, %"],
        ["mar-0", "", "1000", ""],
        ["fasthybrid-0.8", "4.00 (4.00 to 4.00)", "250", "0.0 (0.0 to 7.4)"],
        ["fasthybrid-0.9", "2.50 (2.50 to 2.50)", "400", "0.0 (0.0 to 7.4)"],
        ["fasthybrid-1.0", "1.11 (1.11 to 1.11)", "900", "100.0 (92.6 to 100.0)"],
        ["cspd-0", "1.67 (1.67 to 1.67)", "600", "0.0 (0.0 to 7.4)"],
    ]


def test_folders_of_one_spec_share_the_rows(few, many):
    """One pair of shards has no quartiles. What was measured in one folder stands beside the times of the other."""
    found = cells(table([read(few), read(many)], ["speedup", "identical"]))
    assert found[0] == ["cell", "speed-up, batch 8", "speed-up, batch 8", "identical, %"]
    assert found[2] == ["fasthybrid-0.8", "4.00", "4.00 (4.00 to 4.00)", "0.0 (0.0 to 7.4)"]
    assert len(found) == 6


def test_two_dtypes_are_two_rows(tmp_path):
    stores = []
    for dtype in ("fp32", "int8"):
        store = made_sweeps.write(tmp_path / dtype, images=8)
        store.write_manifest({"batch": made_sweeps.BATCH, "numerics": {"dtype": dtype}}, store.cells())
        stores.append(Store(tmp_path / dtype))

    found = cells(table([read(store) for store in stores], ["head-calls"]))
    assert len(found) == 11
    assert found[1] == ["mar-0, fp32", "1000"] and found[6] == ["mar-0, int8", "1000"]


def test_plain_samplers_alone(many):
    assert [row[0] for row in cells(table([read(many)], ["head-calls"], plain=True))] == ["cell", "mar-0"]


def test_columns(many):
    sweeps = [read(many)]
    assert columns_of(None, sweeps) == ["speedup", "passes", "head-calls", "identical"]
    assert columns_of("passes, judge-scene", sweeps) == ["passes", "judge-scene"]
    with pytest.raises(UserError, match="columns: 'speed' is not one of images, seconds, speedup, "):
        columns_of("speed", sweeps)


def test_measures_of_any_folder_are_columns(few, many):
    """Only the second folder was evaluated."""
    assert columns_of(None, [read(few), read(many)]) == ["speedup", "passes", "head-calls", "identical"]


def test_two_cells_of_one_folder_are_two_rows(tmp_path):
    """A preset may have the values that another cell states."""
    store = Store(tmp_path)
    made = [made_sweeps.cell(name, "mar", {}, 4) for name in ("mar-0", "mar-1")]
    store.write_manifest({"batch": 4}, made)
    shown = cells(table([read(store)], ["head-calls"]))
    assert [row[0] for row in shown] == ["cell", "mar-0", "mar-1"]


def test_counts_are_means(tmp_path):
    """Of made_sweeps.SMALL: shards of 2, 2 and 1 images; 3 passes a shard, 4 head rows an image, half of the drafts."""
    store = made_sweeps.filled(tmp_path)
    found = cells(table([read(store)], ["images", "passes", "head-rows", "accepted", "seconds"]))
    assert found[1] == ["MAR", "5", "3", "4", "50.0 %", "0.500"]


def test_the_command_prints_it(many, lab):
    code, out, _ = lab("table", many.folder.path, "--columns", "head-calls")
    assert code == 0 and cells(out)[1] == ["mar-0", "1000"]
