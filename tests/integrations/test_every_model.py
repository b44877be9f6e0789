"""One class of each of transformers' model types under "slipstream" beside "eager"."""

import pytest

pytest.importorskip("transformers")

from slipstream.integrations.transformers import NAME
from tests.integrations.tiny_models import classes, compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
# padded rows of these differ under transformers' own "sdpa" by as much
ALSO_UNDER_SDPA = ("RecurrentGemmaForCausalLM",)


@pytest.mark.parametrize("name", {kind: name for name, (kind, _) in classes().items()}.values())
def test_model_matches_eager_or_is_refused(name: str) -> None:
    result = compare(name, (NAME,))[NAME]
    if result.outcome == "not run":
        pytest.skip(result.why)
    if name in ALSO_UNDER_SDPA:
        assert result.outcome == compare(name)["sdpa"].outcome
    else:
        assert result.outcome in ("matches", "own attention", "refused"), result.why
