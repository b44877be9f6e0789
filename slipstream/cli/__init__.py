"""The command `slipstream`, in the package's optional dependencies [lm]."""

import sys

LM = "pip install 'slipstream[lm]'"


def main() -> None:
    try:
        from slipstream.cli.commands import app
    except ModuleNotFoundError as error:
        sys.exit(not_installed(error))
    app()


def not_installed(error: ModuleNotFoundError) -> str:
    """One line, with the way out.

    Raises:
        ModuleNotFoundError: a module of our own is missing, which no installation mends.
    """
    name = (error.name or "").partition(".")[0]
    if name in ("", "slipstream"):
        raise error
    extra = "pip install 'slipstream[cuda]'" if name == "triton" else LM
    return f"error: the command wants {name}, which is not installed: {extra}"
