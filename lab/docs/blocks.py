"""Tables and plots between two markers of a page."""

from ...errors import UserError


def markers(name: str) -> tuple[str, str]:
    """The lines around a figure in a page."""
    return f"<!-- figure {name}: begin -->", f"<!-- figure {name}: end -->"


def with_block(text: str, name: str, block: str) -> str:
    """The text of a page with a figure between its markers.

    Raises:
        UserError: the page does not have both markers once.
    """
    begin, end = markers(name)
    before, found, rest = text.partition(begin)
    inside, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in after:
        raise UserError(f"figures: the page of {name} needs the lines {begin} and {end}, once each.")

    return f"{before}{begin}\n{block}\n{end}{after}"
