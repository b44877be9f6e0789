"""Launch of drafts on sm_90: one, and no memory beyond the result and the counters of windows."""

from typing import Any

from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions
from slipstream.kernels.mixer_step.sm90.drafts import mixer_drafts_sm90_kernel
from slipstream.runtime.launch_cache import cached

# what mixer_step_kernel is arguments beside
_ONLY_STEP = ("write_ptr", "row_write", "pending", "D_ptr", "DT_SCALES_V", "GROUP")


def drafts(arguments: dict[str, Any], inputs: StepInputs, options: StepOptions) -> None:
    """arguments: arguments of mixer_step_kernel."""
    B, T, H, HV, K, V = inputs.sizes
    cached(mixer_drafts_sm90_kernel)[HV * B,](
        **{name: x for name, x in arguments.items() if name not in _ONLY_STEP},
        P=options.pending,
        N=T - options.pending,
        HV=HV,
        H=H,
        K=K,
        V=V,
        HEADS_PER_K=HV // H,
        num_warps=V // 16,
        maxnreg=128,
    )
