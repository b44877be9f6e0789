"""Triton for pyright: a kernel's values and Triton's own are of any type.

A jit function's body is not Python that pyright can type: its arguments are tensors of the device,
`tl.constexpr` is no type, and `kernel[grid](...)` is a launch.
"""

from typing import Any

def __getattr__(name: str) -> Any: ...
