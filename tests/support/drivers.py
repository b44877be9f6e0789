"""Stand-ins for a driver."""

from typing import Any


class Driver:
    """The properties of a driver that the JIT reads before it compiles."""

    def get_current_target(self) -> Any:
        from slipstream.compiler.aot import gpu_target

        return gpu_target("sm_90")

    def get_current_device(self) -> int:
        return 99  # no real one: the JIT keeps its kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0
