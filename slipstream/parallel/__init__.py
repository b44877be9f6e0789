"""Several GPUs: a batch whose tokens are divided among ranks."""

from slipstream.parallel.shard import shard as shard
from slipstream.parallel.shard import unshard as unshard
from slipstream.runtime.context_parallel import ContextParallel as ContextParallel
