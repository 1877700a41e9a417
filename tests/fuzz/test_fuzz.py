"""300 mutated files of every kind: each loads or is refused in one sentence, and nothing in it is executed."""

import pytest

pytest.importorskip("transformers", reason="the fuzzer also mutates text encoders")
budget = pytest.importorskip("budget")
if not budget.available():
    pytest.skip("needs fork and /proc", allow_module_level=True)

from fuzzer import fuzz  # noqa: E402

pytestmark = pytest.mark.slow


def test_mutated_files() -> None:
    kinds, problems = fuzz(range(300))
    assert not problems and kinds.total() == 300 and kinds["refused"] > 150, problems
