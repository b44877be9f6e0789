"""One class of each of transformers' model types under "slipstream" beside "eager"."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from slipstream.integrations.transformers import NAME, patch, unpatch
from tests.support.linear_models import LENGTHS, alone, packed_inputs, tiny
from tests.support.tiny_models import build, compare, first_of_each_type

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
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


# learned positions that no one can give, and layers that are not told of positions
NOT_TOLD = frozenset(
    (
        "BartForCausalLM", "BertGenerationDecoder", "BertLMHeadModel", "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "CamembertForCausalLM",
        "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM", "MBartForCausalLM",
        "MarianForCausalLM", "PLBartForCausalLM", "PegasusForCausalLM", "RoCBertForCausalLM",
        "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM",
        "XLMRobertaXLForCausalLM", "XmodForCausalLM",
    )
)  # fmt: skip
# the same beside a cache or a mask, and models that compute with the entries of a mask
TOLD_BY_THE_MASK = frozenset(
    (
        "AXK2ForCausalLM", "CTRLLMHeadModel", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
        "DogeForCausalLM", "Dots3NoteForCausalLM", "FuyuForCausalLM", "GPTBigCodeForCausalLM",
        "Gemma4UnifiedForConditionalGeneration", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM",
        "Llama4ForCausalLM", "MoshiForCausalLM", "PersimmonForCausalLM", "Qwen4ExpForCausalLM",
        "WhisperForCausalLM",
    )
)  # fmt: skip


@pytest.fixture
def _patched() -> Iterator[None]:
    patch()
    yield
    unpatch()


@pytest.mark.usefixtures("_patched")
@pytest.mark.parametrize("name", first_of_each_type("MODEL_FOR_CAUSAL_LM_"))
def test_packed_positions_stay_apart(name: str) -> None:
    if name in NOT_TOLD:
        pytest.skip("its attention is not told of positions")
    try:
        cls, config, weights, inputs, _ = tiny(name)
    except Exception as error:
        pytest.skip(f"not run: {error}")
    model, ids = build(cls, config, NAME, weights), inputs["input_ids"]
    if model.config._attn_implementation != NAME:
        pytest.skip("its own attention")
    ways = [{"use_cache": False}]
    if name not in TOLD_BY_THE_MASK:
        ways += [{}, {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.int64)}]
    with torch.no_grad():
        want = alone(model, ids)
        for way in ways:
            got = model(**packed_inputs("position_ids", ids), **way).logits
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3 * float(want.abs().max()))
