"""``python -m fastar_nodes``."""

import sys

from .errors import missing_packages


def main() -> int:
    """Run the command line; returns its exit code, and 2 if a package that it needs is not installed."""
    missing = missing_packages()
    if missing:
        print(missing, file=sys.stderr)
        return 2

    from .cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
