"""Options that no run can use are refused before it starts."""

import pytest
from fastar_nodes.cli.options import choose_device, whole
from fastar_nodes.errors import UserError
from fastar_nodes.lab.parity.cases import read_json


@pytest.mark.parametrize("name", ["meta", "nosuch", "cuda:99", "", "cpu\0", "x" * 10_000, "9" * 5000])
def test_devices_that_compute_nothing(name: str) -> None:
    with pytest.raises(UserError, match="^device: ") as error:
        choose_device(name)
    assert "choose one of cpu" in str(error.value) and len(str(error.value)) <= 400


@pytest.mark.parametrize("text", ["x" * 10_000, "9" * 5000, "[]", "nan", "1e3"])
def test_long_values_are_shortened(text: str) -> None:
    with pytest.raises(UserError, match="^seed: ") as error:
        whole(text, "seed", 0, 10)
    assert len(str(error.value)) <= 400


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", ""], ids=["lists", "objects", "open", "empty"])
def test_deep_json_is_no_recorded_case(tmp_path, text):
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(UserError, match=r"^spec\.json: .* JSON"):
        read_json(tmp_path / "spec.json")
