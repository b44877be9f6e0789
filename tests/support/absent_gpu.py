"""An H200 that is not there, for Triton's driver.active: kernels are compiled for it."""

from types import SimpleNamespace
from typing import Any

from slipstream.compiler.aot import gpu_target

STREAM = 7


class AbsentGPU:
    """launcher_cls: what launches compiled kernels. utils: besides these, load_binary."""

    def __init__(self, launcher_cls: type, **utils: Any) -> None:
        self.launcher_cls = launcher_cls
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            unload_module=lambda module: None,
            **utils,
        )

    def get_current_target(self) -> Any:
        return gpu_target("sm_90")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM
