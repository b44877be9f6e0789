from typing import Any

# assigned to by primitives/gluon_compat.py
thread_barrier: Any

def __getattr__(name: str) -> Any: ...
