from typing import Any

# assigned to by primitives/sm90.py
thread_barrier: Any

def __getattr__(name: str) -> Any: ...
