"""Other packages' names for Slipstream's functions: fla, flash_attn, causal_conv1d, mamba_ssm.

    import slipstream.compat

    with slipstream.compat.install("fla", "causal_conv1d"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # slipstream's

slipstream.compat.fla and its siblings have the modules, names and arguments of those packages, and
can be imported as they are. install() makes `import fla` find slipstream.compat.fla, for code that
is not to be edited. Nothing is installed by an import.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType

from slipstream.compat import peer_files

__all__ = ["PACKAGES", "Installed", "install", "uninstall"]

# flash_attn_interface is the module of FlashAttention-3
PACKAGES = ("causal_conv1d", "fla", "flash_attn", "flash_attn_interface", "mamba_ssm")


class Installed:
    """The result of install(): as a context manager it uninstalls at the end of the block."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def __enter__(self) -> "Installed":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.packages:  # of none, uninstall() would take all
            uninstall(*self.packages)

    def __repr__(self) -> str:
        return f"Installed{self.packages}"


def install(*packages: str) -> Installed:
    """Makes imports of other packages find Slipstream's modules of their names.

    A name that Slipstream does not have is an ImportError at its import. fla's own layers and
    models (fla.layers, fla.models) are loaded from fla's files, where the distribution
    flash-linear-attention is installed, and run on Slipstream's operators.

    Args:
        packages: any of PACKAGES. Installing one twice is allowed and changes nothing.

    Returns:
        A context manager that uninstalls the packages that this call installed.

    Raises:
        ValueError: a package is none of PACKAGES.
        RuntimeError: the real package is imported already: code that has its functions would go
            on with them. Call install() first.
    """
    for name in packages:
        if name not in PACKAGES:
            raise ValueError(f"packages: want some of {', '.join(PACKAGES)}, got {name!r}")
    new = [name for name in dict.fromkeys(packages) if name not in _installed()]
    for name in new:
        if name in sys.modules:
            raise RuntimeError(
                f"{name} is imported already, from {getattr(sys.modules[name], '__file__', None)}; "
                f"call slipstream.compat.install({name!r}) before anything imports it"
            )
    for name in new:
        importlib.import_module(f"{__name__}.{name}")
        sys.meta_path.insert(0, _Finder(name))
    return Installed(new)


def uninstall(*packages: str) -> None:
    """Undoes install(): the next import of these packages finds the real ones, or nothing.

    Names that were imported before stay what they are.

    Args:
        packages: those to undo; none means all. One that is not installed is passed over.
    """
    for name in packages or PACKAGES:
        if name not in _installed():
            continue
        others = (x for x in sys.meta_path if not isinstance(x, _Finder) or x.package != name)
        sys.meta_path[:] = list(others)
        for module in [x for x in sys.modules if x == name or x.startswith(f"{name}.")]:
            found = sys.modules.pop(module)
            parent, _, attribute = module.rpartition(".")
            ours = sys.modules.get(f"{__name__}.{parent}")
            # the import system made the peer's own files attributes of our modules
            if f"{__name__}.{module}" not in sys.modules and (
                getattr(ours, "__dict__", {}).get(attribute) is found
            ):
                delattr(ours, attribute)


def _installed() -> set[str]:
    return {x.package for x in sys.meta_path if isinstance(x, _Finder)}


class _Finder(MetaPathFinder):
    """Finds `fla.x` as slipstream.compat.fla.x."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        peer = peer_files.peer_spec(
            name, path, [x for x in sys.meta_path if not isinstance(x, _Finder)]
        )
        if peer is not None:
            return peer
        ours = f"{__name__}.{name}"
        try:
            importlib.import_module(ours)
        except ModuleNotFoundError as error:
            if error.name != ours:
                raise
            raise ModuleNotFoundError(
                f"Slipstream has no {name}; slipstream.compat.uninstall({self.package!r}) "
                f"goes back to the real {self.package}",
                name=name,
            ) from None
        return ModuleSpec(name, _Alias(ours), is_package=True)


class _Alias(Loader):
    """Makes a module that is imported already the one under another name too.

    If it has a function imported_as_peer, that is what the peer's module does besides.
    """

    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # the import system takes what a loader leaves under the module's name
        ours = sys.modules[module.__name__] = sys.modules[self.ours]
        # Importing a module makes it its parent's member, also in the place of a function, or of a
        # module that the parent uses, of this name. Such modules are there at once.
        for name in [x for x in sys.modules if x.rpartition(".")[0] == self.ours]:
            child = name.rpartition(".")[2]
            if vars(ours).get(child, sys.modules[name]) is not sys.modules[name]:
                sys.modules.setdefault(f"{module.__name__}.{child}", sys.modules[name])
        getattr(ours, "imported_as_peer", lambda: None)()
