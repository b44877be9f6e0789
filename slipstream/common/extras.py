"""Names the extra of the package that brings a module which is not installed."""

# module -> extra of pyproject.toml; everything else is in [lm]
EXTRAS = {"triton": "cuda", "typer": "cli", "rich": "cli", "yaml": "cli", "datasets": "data"}


def missing(what: str, error: ModuleNotFoundError, extra: str | None = None) -> ModuleNotFoundError:
    """The same error in one line that says what needs the module and which command installs it.

    A module of slipstream itself, which no installation mends, is reported as it is.
    """
    name = (error.name or "").partition(".")[0]
    if name in ("", "slipstream"):
        return error
    command = f"pip install 'slipstream[{extra or EXTRAS.get(name, 'lm')}]'"
    return ModuleNotFoundError(f"{what} needs {name}, which is not installed: {command}", name=name)
