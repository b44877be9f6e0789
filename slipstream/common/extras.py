"""Names the extra of the package that brings a module which is not installed."""

# module -> extra of pyproject.toml
EXTRAS = {"triton": "cuda", "typer": "cli", "rich": "cli", "yaml": "cli", "datasets": "data"}
_LM = ("transformers", "safetensors", "tokenizers", "accelerate", "numpy", "tensorboard")
EXTRAS |= dict.fromkeys(_LM, "lm")


def missing(what: str, error: ModuleNotFoundError, extra: str | None = None) -> ModuleNotFoundError:
    """The same error in one line that says what needs the module and which command installs it.

    A module of slipstream itself, which no installation mends, is reported as it is. A module that
    no extra names, such as one that a reporter of transformers imports, is named itself.
    """
    name = (error.name or "").partition(".")[0]
    if name in ("", "slipstream"):
        return error
    extra = extra or EXTRAS.get(name)
    command = f"pip install {name if extra is None else repr(f'slipstream[{extra}]')}"
    return ModuleNotFoundError(f"{what} needs {name}, which is not installed: {command}", name=name)
