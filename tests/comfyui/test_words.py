"""What the editor shows of words while one types: of a prompt, of labels, and the first nodes of a search.

Both renderers, at the size of a laptop's screen.
"""

from pathlib import Path
from typing import Any

import pytest
from comfy_host import Comfy, load_workflow
from fastar_nodes.runs.labels import PICTURE_BOOK, label_sets
from test_browser import (  # noqa: F401  fixtures
    BOXES,
    LAPTOP,
    MESSAGE,
    OPEN_TEMPLATE,
    _no_complaint,
    _overlaps,
    _run,
    browser,
    editor,
    open_app,
)
from test_fill_in import BUILD, TOOLS
from test_texts import SAVED, SENT

# ruff: noqa: F811

PROMPTED = "04 Text"
# The lines below the prompt that stand on the screen.
LINES = "() => [...document.querySelectorAll('.fastar-words')].filter(e => e.checkVisibility()).map(e => e.innerText)"
SAYS = f"wanted => ({LINES})().join('|').replaceAll('\\n', '|') === wanted"


def wait_for(editor: Any, *lines: str) -> None:
    """Wait until the editor shows these lines about the one prompt; none: nothing."""
    try:
        editor.wait_for_function(SAYS, arg="|".join(lines), timeout=30000)
    except Exception:
        raise AssertionError((editor.evaluate(LINES), lines)) from None


def type_prompt(editor: Any, text: str) -> None:
    editor.locator("textarea:visible:not([readonly])").first.click()
    editor.keyboard.press("Control+A")
    editor.keyboard.type(text)


def test_a_prompt_shows_which_words_it_reads(editor: Any, artifacts: Path) -> None:
    editor.set_viewport_size(LAPTOP)
    editor.evaluate(OPEN_TEMPLATE, [load_workflow(PROMPTED), PROMPTED])
    wait_for(editor, "reads: yellow, house, night")
    editor.wait_for_timeout(1000)
    boxes = {box["type"]: box for box in editor.evaluate(BOXES)}
    assert _overlaps([*boxes.values()]) == [], "the prompt with its lines has a place"
    before = editor.evaluate(SAVED)

    type_prompt(editor, "a purple boats and the small cat at night")
    wait_for(editor, "reads: small, cat, night", "does not know: purple, boats (boat?)")
    editor.screenshot(path=str(artifacts / f"words_{editor.renderer}.png"))

    # Without a subject it says which there are.
    type_prompt(editor, "an elephant")
    wait_for(editor, "does not know: elephant", f"draws: {', '.join(PICTURE_BOOK)}")
    editor.screenshot(path=str(artifacts / f"words unknown_{editor.renderer}.png"))
    now = {box["type"]: box for box in editor.evaluate(BOXES)}
    assert now == boxes, "more lines are scrolled: no node grows over its neighbour"

    # It is neither sent nor saved.
    assert "words" not in editor.evaluate(SENT)
    (prompt,) = [node for node in editor.evaluate(SAVED)["nodes"] if node["type"] == "FastARPrompt"]
    (was,) = [node for node in before["nodes"] if node["type"] == "FastARPrompt"]
    assert len(prompt["widgets_values"]) == len(was["widgets_values"]) and prompt["widgets_values"][0] == "an elephant"

    type_prompt(editor, "boat")
    wait_for(editor, "reads: boat")
    # Without a model nothing is known.
    editor.evaluate("() => app.graph.remove(app.graph._nodes.find(n => n.type === 'FastARLoadHarmon'))")
    type_prompt(editor, "house")
    wait_for(editor)
    _no_complaint(editor)


# The editor of a note is under it.
BOXES_OF_TEXT = "textarea:visible:not([readonly]):not(.comfy-markdown textarea)"


@pytest.mark.parametrize("name, boxes", [(PROMPTED, 2), ("17 Prompt", 1)])
def test_a_negative_prompt_is_shown_where_the_model_reads_one(
    editor: Any, artifacts: Path, name: str, boxes: int
) -> None:
    """Harmon does; Janus has a null prompt of its own."""
    editor.set_viewport_size(LAPTOP)
    editor.evaluate(OPEN_TEMPLATE, [load_workflow(name), name])
    shown = editor.locator(BOXES_OF_TEXT)
    for _ in range(60):
        if shown.count() == boxes:
            break
        editor.wait_for_timeout(500)
    editor.screenshot(path=str(artifacts / f"negative {name[:2]}_{editor.renderer}.png"))
    assert shown.count() == boxes
    _no_complaint(editor)


def test_an_app_tells_which_words_are_unknown(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    """It does not show the prompt's node: while one types and after a run, in a message."""
    editor.set_viewport_size(LAPTOP)
    editor.evaluate(OPEN_TEMPLATE, [load_workflow(PROMPTED), PROMPTED])
    wait_for(editor, "reads: yellow, house, night")
    type_prompt(editor, "a purple dragon")
    wait_for(editor, "does not know: purple, dragon", f"draws: {', '.join(PICTURE_BOOK)}")
    assert editor.locator(MESSAGE).count() == 0, "the node shows it"

    open_app(editor)
    message = editor.locator(MESSAGE)
    type_prompt(editor, "a small pink elephant on the right")
    message.filter(has_text=f"does not know: pink, elephant; draws: {', '.join(PICTURE_BOOK)}").wait_for(timeout=30000)
    editor.screenshot(path=str(artifacts / f"words in an App_{editor.renderer}.png"))
    type_prompt(editor, "a small cat")
    message.wait_for(state="detached", timeout=30000)

    type_prompt(editor, "a small cat, elephant")
    message.filter(has_text="does not know: elephant").wait_for(timeout=30000)
    message.click()
    assert not comfy.failure(_run(comfy, editor))
    message.filter(has_text="Words that demo hybrid does not know: elephant.").wait_for(timeout=10000)
    editor.wait_for_timeout(1500)
    editor.screenshot(path=str(artifacts / f"words in an App after a run_{editor.renderer}.png"))

    # Back in the graph the node shows it.
    editor.evaluate("app.extensionManager.command.execute('Comfy.ToggleLinear')")
    wait_for(editor, "reads: small, cat", "does not know: elephant")
    message.wait_for(state="detached", timeout=5000)
    _no_complaint(editor)


def test_tars_prompt_shows_which_words_it_reads(editor: Any) -> None:
    build = f"""() => {{{TOOLS}
        const prompt = add('FastARTarPrompt', 500, 100), loader = add('FastARLoadTar', 50, 100)
        widget(loader, 'checkpoint').value = 'demo-tar'
        link(loader, prompt, 'tar')
    }}"""
    editor.evaluate(build)
    editor.wait_for_timeout(500)
    type_prompt(editor, "a green hippo")
    wait_for(editor, "reads: green", "does not know: hippo", f"draws: {', '.join(PICTURE_BOOK)}")


MENU = """() => app.graph._nodes.find(n => n.type === 'FastARClassLabel').widgets.find(
    w => w.name === 'add_label').options.values"""
SET = f"""([type, name, value]) => {{{TOOLS}
    set(app.graph._nodes.find(n => n.type === type), name, value)
    app.extensionManager.workflow.activeWorkflow.changeTracker.checkState()
}}"""


def test_the_menu_of_class_label_holds_the_names_that_the_model_knows(editor: Any, artifacts: Path) -> None:
    def has(names: list[str]) -> None:
        editor.wait_for_function(f"names => JSON.stringify(({MENU})()) === JSON.stringify(names)", arg=["none", *names],
                                 timeout=30000)  # fmt: skip

    editor.set_viewport_size(LAPTOP)
    imagenet, book = list(label_sets()["imagenet-1k"]), list(PICTURE_BOOK)
    editor.evaluate(BUILD, ["FastARMARSampler", {"model": ["FastARLoadMAR", "demo"]}])
    has(book)

    editor.evaluate(SET, ["FastARClassLabel", "label_set", "imagenet-1k"])
    has(imagenet)
    editor.evaluate(SET, ["FastARClassLabel", "label_set", "auto"])
    has(book)
    menu = "() => app.graph._nodes.find(n => n.type === 'FastARLoadMAR').widgets[0].options.values"
    (official,) = [choice for choice in editor.evaluate(menu) if choice.startswith("mar-base (")]
    editor.evaluate(SET, ["FastARLoadMAR", "checkpoint", official])
    has(imagenet)

    # Not connected: the names of all sets.
    editor.evaluate("() => app.graph.remove(app.graph._nodes.find(n => n.type === 'FastARLoadMAR'))")
    editor.evaluate(SET, ["FastARClassLabel", "label_set", "auto"])
    has(list(dict.fromkeys([*book, *imagenet])))


# The searches of a beginner: the node that is wanted, and its row at the latest. Before it stand nodes of core whose
# names begin with the query, too, and are shorter or used more often, such as Markdown Note.
SEARCHES = {
    "autoregressive": ("Load MAR", 1),
    "MAR": ("MAR Sampler", 2),
    "masked autoregressive": ("MAR Sampler", 1),
    "inpaint": ("Inpaint (MAR)", 2),
    "compare": ("Compare (FastAR)", 3),
    "label": ("Class Label", 1),
    "negative": ("Prompt (FastAR)", 3),
    "contact sheet": ("Compare (FastAR)", 2),
}
RESULTS = {
    "default": "[data-testid=result-item]",
    "v1 (legacy)": ".option-display-name",
}


@pytest.mark.parametrize("box", RESULTS)
def test_a_search_finds_the_node_that_a_beginner_wants(comfy: Comfy, editor: Any, artifacts: Path, box: str) -> None:
    """In the present search box and in the one before."""
    comfy.post("/settings", {"Comfy.NodeSearchBoxImpl": box})
    editor.evaluate("box => app.extensionManager.setting.set('Comfy.NodeSearchBoxImpl', box)", box)
    editor.set_viewport_size(LAPTOP)
    editor.mouse.dblclick(700, 400)
    field, item = editor.locator("input[role=combobox]"), editor.locator(RESULTS[box])
    field.wait_for(timeout=20000)

    for query, (wanted, row) in SEARCHES.items():
        field.fill(query)
        shown: list[str] = []
        for _ in range(20):
            editor.wait_for_timeout(500)
            shown = [text.strip().split("\n")[0].strip() for text in item.all_inner_texts()[:row]]
            if wanted in shown:
                break
        assert wanted in shown, (query, shown)
        if query in ("autoregressive", "compare"):
            editor.screenshot(path=str(artifacts / f"search {query} {box[:2]}_{editor.renderer}.png"))
