"""PEFT's methods on a model with a layer of every mixer: trained, merged, saved, several at once.

pip install "slipstream[trainers]"
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.trainer_runs import IDS, generated, make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
peft = pytest.importorskip("peft")
ALL = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}
PROJECTIONS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "o_proj"]}


def small() -> Any:
    return make("every", tie_word_embeddings=False)


def linears(*more: str) -> list[str]:
    names = {n.split(".")[-1] for n, x in small().named_modules() if isinstance(x, nn.Linear)}
    return sorted(names - {"lm_head"} | set(more))


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 3, **ALL, **options})


def every_linear(cls: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, cls)(task_type="CAUSAL_LM", target_modules=linears(), **options)


METHODS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "rslora": lambda: lora(use_rslora=True),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "olora": lambda: lora(init_lora_weights="olora"),
    "biases": lambda: lora(bias="all"),
    "rank pattern": lambda: lora(rank_pattern={"q_proj": 5}, alpha_pattern={"v_proj": 9}),
    "some layers": lambda: lora(
        target_modules=linears(), layers_to_transform=[0, 3, 8], layers_pattern="layers"
    ),
    "embedding": lambda: lora(target_modules=linears("embed_tokens")),
    "head": lambda: lora(target_modules=["lm_head", "q_proj"]),
    "whole modules": lambda: lora(modules_to_save=["norm", "embed_tokens", "lm_head"]),
    "tokens of lora": lambda: lora(trainable_token_indices=[1, 2, 8]),
    "parameters": lambda: lora(target_modules=[], target_parameters=["mixer.q_proj.weight"]),
    "tokens": lambda: peft.TrainableTokensConfig(
        task_type="CAUSAL_LM", token_indices=[1, 8, 15], target_modules=["embed_tokens"]
    ),
    "ia3": every_linear("IA3Config", feedforward_modules=["down_proj"]),
    "loha": every_linear("LoHaConfig", r=3),
    "lokr": every_linear("LoKrConfig", r=3),
    "oft": lambda: peft.OFTConfig(**PROJECTIONS, oft_block_size=4),
    "boft": lambda: peft.BOFTConfig(**PROJECTIONS, boft_block_size=4),
    "vera": lambda: peft.VeraConfig(**{**PROJECTIONS, "target_modules": ["q_proj"]}, r=3),
    "fourierft": lambda: peft.FourierFTConfig(**PROJECTIONS, n_frequency=20),
    "hra": lambda: peft.HRAConfig(**PROJECTIONS, r=2),
    "miss": lambda: peft.MissConfig(**PROJECTIONS, r=4),
    "norms": lambda: peft.LNTuningConfig(
        task_type="CAUSAL_LM", target_modules=["norm", "mixer_norm", "mlp_norm"]
    ),
}
# whose start is no longer the model's own weights
CHANGES_BASE = {"pissa", "olora", "biases"}


def adapted(config: Any, **options: Any) -> Any:
    """With every trainable weight moved, so that a missing factor shows."""
    model = peft.get_peft_model(small(), config, **options)
    moved(model)
    return model


@torch.no_grad()
def moved(model: Any) -> None:
    torch.manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.add_(torch.randn_like(p), alpha=0.05)


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **options).logits


def assert_near(got: Tensor, want: Tensor, tolerance: float = 1e-3) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def loss_of(found: Tensor, ids: Tensor = IDS) -> Tensor:
    return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("method", METHODS)
def test_method_trains_decodes_saves_and_merges(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PEFT adds the folder of BOFT's extension
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = adapted(METHODS[method]())
    out = model.train()(input_ids=IDS, labels=IDS, logits_to_keep=0)
    torch.testing.assert_close(out.loss, loss_of(out.logits), rtol=1e-4, atol=1e-4)
    out.loss.backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None for g in trained.values())
    want = logits(model)
    ids = IDS[:, :4]
    made = generated(model, ids)
    for _ in range(3):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, ids)
    if method not in CHANGES_BASE:
        with model.disable_adapter():
            assert_near(logits(model), logits(small()))
    if method not in ("pissa", "olora"):
        model.save_pretrained(tmp_path)
        assert_near(logits(peft.PeftModel.from_pretrained(small(), tmp_path)), want)
    model.merge_adapter()
    assert_near(logits(model), want)
    model.unmerge_adapter()
    assert_near(logits(model), want)
    assert_near(logits(model.merge_and_unload()), want)


def two() -> tuple[Any, dict[str, Tensor]]:
    model = adapted(lora(r=2), adapter_name="a")
    model.add_adapter("b", lora(r=2))
    model.set_adapter("b")
    moved(model)
    found = {}
    for name in "ab":
        model.set_adapter(name)
        found[name] = logits(model)
    assert (found["a"] - found["b"]).abs().max() > 1e-4
    return model, found


def test_adapters_of_rows() -> None:
    """A row each; rows of several lengths are packed as one, which PEFT refuses to divide."""
    model, found = two()
    got = logits(model, adapter_names=["a", "b"])
    assert_near(got[0], found["a"][0])
    assert_near(got[1], found["b"][1])
    assert generated(model, IDS[:, :4], adapter_names=["a", "b"]).shape == (2, 7)
    mask = torch.ones_like(IDS)
    mask[1, -3:] = 0
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        logits(model, attention_mask=mask, adapter_names=["a", "b"])


def test_prefix_tuning_is_refused_by_name() -> None:
    """Its keys and values are not a state."""
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=26, token_dim=16,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"want a slipstream\.models\.StateCache, got Dyn"):
        peft.get_peft_model(small(), config)(input_ids=IDS, labels=IDS)
