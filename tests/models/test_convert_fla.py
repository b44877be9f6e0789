"""fla's models, made by fla's own classes on slipstream.compat, converted and back. Wants fla's
files, as tests/compat/test_fla_interop.py does."""

import importlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream.compat
from slipstream.models import SlipstreamForCausalLM
from slipstream.models.convert import convert
from tests.support.conversion import assert_converts, randomize

pytest.importorskip("einops")
try:
    importlib.metadata.distribution("fla-core")
    importlib.metadata.distribution("flash-linear-attention")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("fla's files are not there", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}
FOUR = {"num_heads": 4}
HEADS = {"num_heads": 2, "num_v_heads": 4, "head_dim": 16}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 13, "qkv_bias": True}
RWKV = {"head_dim": 16, "decay_low_rank_dim": 8, "a_low_rank_dim": 6, "v_low_rank_dim": 4}
RWKV |= {"gate_low_rank_dim": 10}
# with more groups fla's path for CPUs gives heads those of others: B.repeat, unlike its kernels
MAMBA = {"head_dim": 16, "state_size": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", FOUR),
    "gla-grouped": (
        "GLA",
        {**FOUR, "num_kv_heads": 2, "feature_map": "sqrelu", "use_short_conv": True,
         "clamp_min": -0.1, "attn": ATTENTION},
    ),
    "gla-ungated": ("GLA", {**FOUR, "use_output_gate": False, "tie_word_embeddings": True}),
    "gla-unnormed": ("GLA", {**FOUR, "elementwise_affine": False, "intermediate_size": None}),
    "retnet": ("RetNet", FOUR),
    "retnet-grouped": (
        "RetNet", {**FOUR, "num_kv_heads": 2, "feature_map": "relu2", "expand_k": 0.5},
    ),
    "retnet-ungated": ("RetNet", {**FOUR, "use_output_gate": False, "attn": ATTENTION}),
    "delta_net": ("DeltaNet", FOUR),
    "delta_net-gated": (
        "DeltaNet",
        {**FOUR, "use_gate": True, "expand_k": 0.5, "allow_neg_eigval": True, "use_beta": False},
    ),
    "delta_net-elu": ("DeltaNet", {**FOUR, "qk_activation": "elu", "qk_norm": "sum"}),
    "delta_net-unconvolved": (
        "DeltaNet", {**FOUR, "use_short_conv": False, "qk_activation": "identity"},
    ),
    "gated_deltanet": ("GatedDeltaNet", {**HEADS, "attn": ATTENTION}),
    "gated_deltanet-sigmoid": (
        "GatedDeltaNet",
        {**HEADS, "output_gate_activation": "sigmoid", "allow_neg_eigval": True, "expand_v": 1},
    ),
    "gated_deltanet-plain": (
        "GatedDeltaNet", {**HEADS, "use_gate": False, "use_short_conv": False},
    ),
    "kda": ("KDA", {**HEADS, "expand_v": 1.5}),
    "kda-bounded": (
        "KDA", {**HEADS, "safe_gate": True, "lower_bound": -4.0, "allow_neg_eigval": True},
    ),
    "kda-unconvolved": ("KDA", {**HEADS, "use_short_conv": False, "attn": ATTENTION}),
    "forgetting_transformer": ("ForgettingTransformer", FOUR),
    "forgetting_transformer-grouped": (
        "ForgettingTransformer",
        {**FOUR, "num_kv_heads": 2, "qkv_bias": True, "use_output_gate": True, "window_size": None},
    ),
    "rwkv7": ("RWKV7", RWKV),
    "rwkv7-unbiased": ("RWKV7", {**RWKV, "norm_bias": False, "norm_first": False}),
    "fla_mamba2": ("Mamba2", MAMBA),
    "fla_mamba2-plain": (
        "Mamba2",
        {**MAMBA, "D_has_hdim": True, "rmsnorm": False, "use_bias": True, "use_conv_bias": False},
    ),
    "mamba3": ("Mamba3", {**MAMBA, "n_groups": 2}),
    "mamba3-normed": ("Mamba3", {**MAMBA, "is_outproj_norm": True, "rope_fraction": 1.0}),
    "mamba3-mimo": ("Mamba3", {**MAMBA, "is_mimo": True, "mimo_rank": 3, "use_bias": True}),
    "mamba3-mimo normed": (
        "Mamba3",
        {**MAMBA, "n_groups": 2, "is_mimo": True, "is_outproj_norm": True, "rope_fraction": 1.0},
    ),
    "fla_mamba2-before": (
        "Mamba2", {**MAMBA, "norm_before_gate": True, "dt_limit": (0.01, 2.0)},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def fla() -> Iterator[ModuleType]:
    with warnings.catch_warnings(), slipstream.compat.install(*slipstream.compat.PACKAGES):
        warnings.simplefilter("ignore")  # of what fla's files warn as they are imported
        found = importlib.import_module("fla.models")
        # fla's refuses a CPU, where compat's kernels run
        importlib.import_module("fla.layers.mamba3").Mamba3.forward = _mamba3_forward
        yield found


def _mamba3_forward(self: Any, hidden_states: Tensor, **options: Any) -> tuple[Any, ...]:
    y, _ = self.cuda_kernels_forward(hidden_states)
    return y, None, options.get("past_key_values")


def original(fla: ModuleType, name: str) -> Any:
    prefix, options = MODELS[name]
    torch.manual_seed(0)
    given = {**SMALL, **options}
    if prefix in ("Mamba2", "Mamba3"):
        del given["intermediate_size"]
    config = getattr(fla, f"{prefix}Config")(**given)
    model = getattr(fla, f"{prefix}ForCausalLM")(config)
    randomize(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_model_converts_and_back(fla: ModuleType, name: str, tmp_path: Path) -> None:
    assert_converts(original(fla, name), tmp_path, name.partition("-")[0])


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "gla", "rwkv7"])
def test_models_train_alike(fla: ModuleType, name: str, tmp_path: Path) -> None:
    theirs = original(fla, name)
    theirs.config.use_l2warp = False  # adds to the gradients of the logits
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    losses = []
    for model in (theirs, SlipstreamForCausalLM.from_pretrained(tmp_path / "ours")):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.5)
        torch.manual_seed(1)
        ids = torch.randint(1, 97, (4, 70))  # fla gives its pad_token_id no gradient
        losses.append([])
        for _ in range(4):
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.01
