"""One class of each of transformers' model types under "slipstream" beside "eager"."""

import pytest

pytest.importorskip("transformers")

from slipstream.integrations.transformers import NAME
from tests.support.tiny_models import compare, first_of_each_type

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]
# their recurrence reads what attention gives at padding; differs under transformers' own "sdpa" too
ALSO_UNDER_SDPA = ("RecurrentGemmaForCausalLM", "RecurrentGemmaModel")


@pytest.mark.parametrize("name", first_of_each_type())
def test_model_matches_eager_or_is_refused(name: str) -> None:
    result = compare(name, (NAME,))[NAME]
    if result.outcome == "not run":
        pytest.skip(result.why)
    if name in ALSO_UNDER_SDPA:
        assert result.outcome == compare(name)["sdpa"].outcome
    else:
        assert result.outcome in ("matches", "own attention", "refused"), result.why
