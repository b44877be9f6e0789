"""The portable attention kernels on a GPU, every feature of the family's table of calls."""

import pytest
import torch

from slipstream.kernels.attention.inputs import AttentionOptions
from tests.support.attention_calls import CALLS, Call, check, got, incoming, want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTHS = [(64, 64), (80, 96), (192, 128), (64, 256), (256, 256)]


@pytest.mark.parametrize(("D", "DV"), WIDTHS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_kernels_match_reference(call: Call, D: int, DV: int) -> None:
    """Gradients of sinks, gates and lse among them; the same bits twice."""
    from slipstream.kernels.attention.triton import launch

    here = Call(**{**vars(call), "D": D, "DV": DV}).terms(torch.bfloat16)
    terms = here._replace(**{n: x.cuda() for n, x in here._asdict().items() if x is not None})
    do, dlse = (x.cuda() for x in incoming(here))
    sign = -1 if call.scale < 0 else bool(call.scale)
    options = AttentionOptions(sign * D**-0.5, *call.options[1:])
    found = got(launch, terms, options, do, dlse)
    check(found, want(terms, options, do, dlse), 2e-2, call.name)
    for name, x in got(launch, terms, options, do, dlse).items():
        assert torch.equal(x, found[name]), f"{name} differs from run to run"
