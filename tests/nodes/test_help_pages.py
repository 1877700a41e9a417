"""Help pages and docs/settings.md: they are what the tooltips and longer texts make."""

from fastar_nodes.lab.docs import help_pages
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.settings import knobs
from test_schemas import NODES


def test_the_pages_are_what_the_texts_make():
    changed = [path.name for path, text in help_pages.written().items() if path.read_text(encoding="utf-8") != text]
    assert not changed, f"run `make texts`, which writes {', '.join(changed)}"


def test_the_table_has_every_setting_of_every_sampler():
    page = help_pages.settings_page()
    for name, entry in SAMPLERS.items():
        title = entry.title.split(" + ")[0]
        for setting in knobs(entry.settings):
            rows = [line for line in page.splitlines() if line.startswith(f"| *{setting}* |")]
            assert any("+" in name or name == "tar" or title in row for row in rows), (name, setting)


def test_no_longer_text_is_of_an_input_that_is_not_there():
    for node in help_pages.node_classes():
        about = node.define_schema()
        assert set(getattr(node, "more", {})) <= {part.id for part in about.inputs}, about.node_id
        assert set(getattr(node, "more_of_outputs", {})) <= {part.id for part in about.outputs}, about.node_id
    for name in help_pages.of_many():
        assert any(name == part.id for about in NODES.values() for part in about.inputs), name
