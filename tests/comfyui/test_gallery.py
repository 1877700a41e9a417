"""The template browser of ComfyUI's editor with the templates of this pack: order, thumbnails, searches."""

import re
from pathlib import Path
from typing import Any

from comfy_host import TEMPLATES, Comfy
from test_browser import browser, editor  # noqa: F401  fixtures

# ruff: noqa: F811

CARDS = "[data-testid^='template-workflow-']"
NAMES = f"""() => [...document.querySelectorAll("{CARDS}")].map(
    card => card.dataset.testid.replace('template-workflow-', ''))"""
# Width of the thumbnail of every card; 0 if it is not there, None of a card further down, which is drawn later.
WIDTHS = f"""() => [...document.querySelectorAll("{CARDS}")].map(
    card => [...card.querySelectorAll('img')].map(image => image.complete ? image.naturalWidth : 0)[0])"""
# Words to numbers of the templates that they must find.
SEARCHES = {
    "janus": {17, 18},
    "edit": {18},
    "inpaint": {5},
    "MAR": {1, 5, 6, 7},
    "FastAR": {1, 2, 3},
    "compare": {6, 7, 8},
    "negative": {4},
    "upscale": {9},
    "BitDance": {14},
}


def test_the_gallery_shows_and_finds_the_templates(comfy: Comfy, editor: Any, artifacts: Path) -> None:
    editor.set_viewport_size({"width": 1366, "height": 768})
    editor.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    editor.get_by_text("FastAR", exact=True).first.click(timeout=60000)
    editor.locator(CARDS).first.wait_for(timeout=60000)
    editor.wait_for_timeout(3000)
    editor.screenshot(path=str(artifacts / f"gallery_{editor.renderer}.png"))
    names = editor.evaluate(NAMES)
    assert names == TEMPLATES[: len(names)]
    widths = editor.evaluate(WIDTHS)
    assert widths[:3] == [512] * 3 and {*widths} <= {512, None}

    box = editor.get_by_placeholder(re.compile("search", re.IGNORECASE)).last
    for words, numbers in SEARCHES.items():
        box.fill(words)
        editor.wait_for_timeout(2500)
        found = [name for name in editor.evaluate(NAMES) if name in TEMPLATES]
        assert numbers <= {int(name[:2]) for name in found}, words
        if words == "FastAR":
            without_download = [name for name in TEMPLATES if "download" not in name]
            assert [name for name in found if "download" not in name] == without_download, "in their order, too"
        editor.screenshot(path=str(artifacts / f"gallery {words}_{editor.renderer}.png"))
    assert editor.problems == []
