"""The command `slipstream`, in the package's optional dependencies [cli]; training needs [lm]."""

import sys

from slipstream import __version__
from slipstream.common.extras import missing


def main() -> None:
    try:
        from slipstream.cli.commands import app
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["--version"]:  # which needs no package
            print(f"slipstream {__version__}")
            return
        sys.exit(not_installed(error))
    app()


def not_installed(error: ModuleNotFoundError) -> str:
    """One line, with the way out.

    Raises:
        ModuleNotFoundError: a module of our own is missing, which no installation mends.
    """
    if (error.name or "slipstream").partition(".")[0] == "slipstream":
        raise error
    return f"error: {missing('the command', error)}"
