"""Hostile values on the inputs of all nodes; see hostile_values.py."""

from __future__ import annotations

import hostile_values
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_result_or_a_sentence():
    wrong = [
        f"{name}: {problem}"
        for name, inputs in hostile_values.cases(400, 3)
        if (problem := hostile_values.judge(name, inputs))
    ]
    assert not wrong, "\n\n".join(wrong[:5])


def test_every_node_runs_with_its_valid_inputs(monkeypatch):
    """Otherwise a hostile value would never be reached."""
    given = hostile_values.sockets()
    for name, node in hostile_values.NODES.items():
        inputs = hostile_values.valid_inputs(node, given)
        needed = {i.id for i in node.define_schema().inputs if not i.optional and i.kind not in hostile_values.WIDGETS}
        assert needed <= {*inputs}, f"{name} needs {needed - {*inputs}} in sockets()"
