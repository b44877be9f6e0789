"""Options of a mixer in a configuration that no mixer can take."""

import pytest

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM


@pytest.mark.parametrize(
    ("mixer", "error", "words"),
    [({"type": "gla", "bidirectional": True}, ValueError, "bidirectional: no such"),
        ({"type": "mamba3", "mimo_rank": 0}, ValueError, "mimo_rank"),
        ({"type": "gla", "expand": 2}, ValueError, r"^mixers\[0\].expand: .*mean expand_"),
        ({"type": "forgetting_attn", "windows": 2}, ValueError, "did you mean window_size"),
        ({"type": "gdn2", "head_dims": 2}, ValueError, "did you mean head_dim"),
        ({"type": "kda", "hidden_size": 32}, ValueError, "hidden_size: no such option of kda")],
    ids=str,
)  # fmt: skip
def test_options_of_mixers_are_refused_by_name(mixer: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        SlipstreamForCausalLM(SlipstreamConfig(vocab_size=23, hidden_size=32, mixers=[mixer]))
