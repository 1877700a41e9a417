"""Makes ``import fastar_nodes`` load this checkout, installed or not; imported for that effect, before the package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if "fastar_nodes" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "fastar_nodes", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["fastar_nodes"] = package
    spec.loader.exec_module(package)
