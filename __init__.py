"""FastAR: fast autoregressive image generation, for ComfyUI and for scripts.

ComfyUI calls :func:`comfy_entrypoint`. Scripts call :func:`load`, which gives a pipeline, or the loaders and samplers
below one by one; see docs/python.md, and docs/sockets.md for other node packs. The public names stand in api.py; a
module is imported when one of its names is first used.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import *  # noqa: F403

# The name under which scripts and other packs import this package.
_NAME = "fastar_nodes"
# A node that every copy of this pack registers with ComfyUI; its module is the one that ComfyUI imported.
_NODE = "FastARLoadMAR"


def _other_copy():
    """The folder of another copy of this pack, whose nodes ComfyUI has; None if there is none.

    Two copies would register one route twice, at which ComfyUI's server ends, and run every script of the editor twice.
    """
    import sys
    from pathlib import Path

    registered = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    module = sys.modules.get(getattr(registered.get(_NODE), "__module__", ""))
    if module is None:
        return None

    folder = Path(module.__file__).parent
    return None if folder == Path(__file__).parent else folder


# ComfyUI reads it after this module is imported: the editor loads the scripts of one copy.
WEB_DIRECTORY = None if _other_copy() else "./web"


async def comfy_entrypoint():
    """The extension with all nodes; called by ComfyUI's loader, which writes what is raised here to its log.

    Raises:
        UserError: ComfyUI has loaded another copy of this pack.
    """
    other = _other_copy()
    if other:
        from pathlib import Path

        from .errors import UserError

        here = Path(__file__).parent
        raise UserError(
            f"FastAR is installed twice: ComfyUI uses {other} and ignores {here}; delete one of the two folders."
        )

    from importlib import import_module

    return import_module(".nodes", _package()).make_extension(__name__)


def _package():
    """The name of this package in ``sys.modules``: ``fastar_nodes``, which other packs import.

    ComfyUI imports a pack under the path of its folder. Where the name belongs to another copy already, which some pack
    imported from elsewhere, this one keeps its path.
    """
    import sys
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    here = Path(__file__)
    known = sys.modules.get(_NAME)
    if known is None:
        spec = spec_from_file_location(_NAME, here, submodule_search_locations=[str(here.parent)])
        known = module_from_spec(spec)
        sys.modules[_NAME] = known
        spec.loader.exec_module(known)

    if known.__file__ and Path(known.__file__).resolve() == here.resolve():
        return _NAME

    import logging

    message = "FastAR: other packs import %s from %s, but ComfyUI runs the copy in %s"
    logging.warning(message, _NAME, known.__file__, here.parent)
    return __name__


@lru_cache(maxsize=1)
def _public():
    """The public names with their modules, from the import statements of api.py."""
    import ast
    from pathlib import Path

    listed = ast.parse((Path(__file__).parent / "api.py").read_text(encoding="utf-8-sig"))

    modules = {}
    for statement in listed.body:
        if isinstance(statement, ast.ImportFrom):
            modules |= {alias.name: statement.module for alias in statement.names}
    return modules


if not TYPE_CHECKING:  # a type checker would take any name from it

    def __getattr__(name):
        """A public name, imported when it is first used."""
        # pytest imports this file as a module of its own in some folders.
        if name.startswith("_") or not __package__ or name not in _public():
            raise AttributeError(_unknown(name))

        from importlib import import_module

        from .errors import missing_packages

        if name != "UserError":
            missing = missing_packages()
            if missing:
                raise ImportError(missing, name=name)

        module = _public()[name]
        try:
            value = getattr(import_module(f".{module}", __name__), name)
        except AttributeError:  # a module of the package
            value = import_module(f".{module}.{name}", __name__)

        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_public()})


def _unknown(name):
    """The message for a name that is not public, with the closest one that is."""
    message = f"module {__name__!r} has no attribute {name!r}"
    # Loaders and the import system probe for private names and constants.
    if name.startswith("_") or name.isupper():
        return message

    from difflib import get_close_matches

    close = get_close_matches(name, _public(), 1)
    return f"{message}. Did you mean: {close[0]!r}?" if close else message
