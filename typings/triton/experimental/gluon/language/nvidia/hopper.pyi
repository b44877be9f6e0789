from typing import Any

fence_async_shared: Any
mbarrier: Any
tma: Any
warpgroup_mma: Any
warpgroup_mma_wait: Any
