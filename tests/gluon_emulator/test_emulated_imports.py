"""What the emulator imports does not depend on what was imported before it."""

import importlib
import pkgutil
import re
import sys

from slipstream import kernels
from tests.gluon_emulator import linear, threads
from tests.support import wants

pytestmark = wants.triton
NAMES = [x.name for x in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
# files of kernels, which import neither launches nor back ends
KERNELS = [
    x
    for x in NAMES
    if re.search(r"\.sm90(\.|_kernels)", x) and not x.endswith(("launch", "backend", "tma"))
]


def test_emulated_kernels_hold_none_for_the_compiler() -> None:
    before = {name: importlib.import_module(name) for name in NAMES}
    assert len(KERNELS) > 40 and any(map(threads._has_kernels, KERNELS))
    for name in KERNELS:
        with linear.emulated():
            made = vars(importlib.import_module(name)).items()
            fakes = [sys.modules[x] for x in ("triton", "triton.language")]
            assert [n for n, x in made if x not in fakes and threads._is_tritons(x)] == [], name
    for name, module in before.items():
        package, _, child = name.rpartition(".")
        assert sys.modules[name] is module and vars(sys.modules[package])[child] is module
