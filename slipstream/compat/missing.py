"""The error of a name that a peer has and Slipstream does not."""

from collections.abc import Callable, Collection
from typing import Any


def missing_names(module: str, names: Collection[str]) -> Callable[[str], Any]:
    """The __getattr__ of a module under slipstream.compat.

        __getattr__ = missing_names(__name__, ("chunk_abc",))

    Args:
        module: its full name.
        names: what the peer's module has and this one has not. For these an ImportError says so,
            which `from module import name` raises as it is; hasattr() of any other name is False.
    """
    peer = module.removeprefix("slipstream.compat.")

    def getattr_of_module(name: str) -> Any:
        if name in names:
            raise ImportError(
                f"Slipstream has no {peer}.{name}; "
                f"slipstream.compat.uninstall({peer.partition('.')[0]!r}) goes back to the real "
                f"{peer.partition('.')[0]}",
                name=peer,
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module
