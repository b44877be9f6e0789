"""Saved checkpoints in processes that do not import slipstream.models; keys of the config."""

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from tests.support.byte_tokenizer import tokenizer
from tests.support.forked import run_code
from tests.support.language_models import small_model

LOAD = """
import sys
from pathlib import Path
{first}
from transformers import AutoConfig, AutoModelForCausalLM
{then}
assert "slipstream.models" not in sys.modules
for path in sys.argv[1:]:
    m = AutoModelForCausalLM.from_pretrained(path{options})
    assert type(m).__module__ == "slipstream.models.model", type(m)
    print(repr(sum(p.double().sum().item() for p in m.parameters())))
m.save_pretrained(Path(path).parent / "again")
"""


def small() -> SlipstreamForCausalLM:
    return small_model(["gla"]).eval()


@pytest.mark.parametrize(
    ("first", "then", "options"),
    [
        pytest.param("import slipstream", "", "", marks=()),
        pytest.param("", "import slipstream", "", marks=pytest.mark.slow),
        pytest.param("", "", ", trust_remote_code=True", marks=()),
    ],
    ids=["imported before", "imported after", "remote code"],
)
def test_auto_classes_load_a_saved_model(
    tmp_path: Path, first: str, then: str, options: str
) -> None:
    m = small()
    m.save_pretrained(tmp_path / "run")
    code = LOAD.format(first=first, then=then, options=options)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = run_code(code, tmp_path / "run", env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    want = sum(p.double().sum().item() for p in m.parameters())
    assert float(result.stdout.split()[-1]) == pytest.approx(want, rel=1e-9, abs=1e-9)
    for name in ("config.json", "modeling_slipstream.py"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "run" / name).read_text()


SERVE = """
import sys
import transformers.cli.add_new_model_like  # as its commands do; makes transformers a second time
from transformers.cli.serving.model_manager import ModelManager
model = ModelManager(device="cpu", trust_remote_code=True)._load_model(sys.argv[1])
assert type(model).__module__ == "slipstream.models.model", type(model)
"""


@pytest.mark.slow
def test_transformers_serve_loads_a_saved_model(tmp_path: Path) -> None:
    """It looks the class up in transformers, not in the Auto classes."""
    small().save_pretrained(tmp_path / "run")
    tokenizer().save_pretrained(tmp_path / "run")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = run_code(SERVE, tmp_path / "run", env=environment)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"return_dict_in_generate": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_generate_takes_a_tokenizer_for_stop_strings(options: dict[str, Any]) -> None:
    """transformers passes it on to the model's loop of steps with the model's arguments."""
    tok = tokenizer()
    m = small_model(["gla"], vocab_size=257, pad_token_id=0).eval()
    ids = torch.tensor([tok("the cat")["input_ids"]])
    greedy = {"do_sample": False, "max_new_tokens": 6, **options}
    want = m.generate(ids, **{**greedy, "return_dict_in_generate": True}).sequences
    last = tok.decode(want[0, ids.shape[1]])
    made = m.generate(ids, **greedy, tokenizer=tok, stop_strings=[last])
    made = getattr(made, "sequences", made)
    assert torch.equal(made[:, : ids.shape[1]], ids) and made.shape[1] <= want.shape[1]
    made = m.generate(ids, **greedy, tokenizer=tok, stop_strings=["zzz"])
    assert torch.equal(getattr(made, "sequences", made), want)


def test_config_refuses_unknown_keys() -> None:
    with pytest.raises(TypeError, match=r"hidden_sise.*did you mean hidden_size\?"):
        SlipstreamConfig(hidden_sise=256)
    with pytest.raises(TypeError, match="nonsense: no such key"):
        SlipstreamConfig(nonsense=5)
    with pytest.raises(ValueError, match="num_hidden_layers: want the 1 entries"):
        SlipstreamConfig(mixers=["gla"], num_hidden_layers=2)


def test_config_takes_the_keys_of_transformers() -> None:
    config = SlipstreamConfig(
        mixers=["gla"],
        num_hidden_layers=1,
        num_attention_heads=8,
        num_labels=3,
        torch_dtype="bfloat16",
        name_or_path="here",
        output_hidden_states=True,
        attn_implementation="eager",
        temperature=0.7,
        id2label={0: "a", 1: "b", 2: "c"},
        quantization_config=None,
    )
    assert config.num_heads == 8 and config.dtype is torch.bfloat16 and config.num_labels == 3
    again = SlipstreamConfig(**config.to_dict())
    assert "AutoModelForCausalLM" in config.auto_map  # as TRL asks
    assert again.to_dict() == config.to_dict()


@torch.no_grad()
def test_model_and_config_are_copied_and_pickled() -> None:
    m, ids = small(), torch.randint(17, (2, 5))
    want = m(ids).logits
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(ids).logits, want)
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert other.model.embed_tokens.weight is not m.model.embed_tokens.weight
    for other in (copy.deepcopy(m.config), pickle.loads(pickle.dumps(m.config))):
        assert other.to_dict() == m.config.to_dict()
