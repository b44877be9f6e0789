"""fla's own layers and models on slipstream.compat.fla.

Wants fla's files, which install nothing else:

    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops
"""

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream.compat
import slipstream.layers

for name in ("einops", "transformers"):
    pytest.importorskip(name)
try:
    for name in ("fla-core", "flash-linear-attention"):
        importlib.metadata.distribution(name)
except importlib.metadata.PackageNotFoundError:
    pytest.skip("fla's files are not there", allow_module_level=True)
pytestmark = pytest.mark.slow

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 32,
    "expand_ratio": 16,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
MODELS = (
    "Comba", "DeltaNet", "ForgettingTransformer", "GLA", "GSA", "GatedDeltaNet",
    "GatedDeltaProduct", "HGRN", "HGRN2", "KDA", "LinearAttention", "MLA", "Mamba",
    "Mamba2", "RWKV6", "RWKV7", "Raven", "RetNet", "Samba",
    "Transformer", "YOCO",
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "Samba": {"attn": {"layers": [1], "num_heads": 2, "window_size": 32}}
}
# of fla's own: models that give their layers no offsets, and those that refuse several new tokens
HAND_NO_OFFSETS_ON = ("LinearAttention", "Mamba", "Mamba2", "Samba")
ONE_TOKEN_A_STEP = ("ForgettingTransformer", "MLA", "Transformer")
LENGTH, DECODED, PADDING = 70, 4, 20


@pytest.fixture(scope="module")
def fla() -> Iterator[ModuleType]:
    with warnings.catch_warnings(), slipstream.compat.install(*slipstream.compat.PACKAGES):
        warnings.simplefilter("ignore")  # of what fla's files warn as they are imported
        yield importlib.import_module("fla.models")


def model(fla: ModuleType, name: str, **options: Any) -> Any:
    config = getattr(fla, f"{name}Config")
    known = inspect.signature(config.__init__).parameters
    given = CONFIG | OPTIONS.get(name, {}) | options
    torch.manual_seed(0)
    made = getattr(fla, f"{name}ForCausalLM")(
        config(**{n: x for n, x in given.items() if n in known})
    )
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_model_decodes_what_it_computes(fla: ModuleType, name: str) -> None:
    """A loss with gradients everywhere; a prompt and four tokens, and a padded row, equal all."""
    made = model(fla, name).train()
    ids = torch.randint(0, 97, (2, LENGTH))
    made(ids, labels=ids).loss.backward()
    assert [n for n, p in made.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in made.parameters())
    made.eval()
    begin = LENGTH - DECODED
    with torch.no_grad():
        whole = made(ids).logits
        step = made(ids[:, :begin], use_cache=True)
        logits = [step.logits[:, -1:]]
        for t in range(begin, LENGTH):
            mask = torch.ones(2, t + 1, dtype=torch.long)
            past = step.past_key_values
            step = made(
                ids[:, t : t + 1], attention_mask=mask, past_key_values=past, use_cache=True
            )
            logits.append(step.logits)
        torch.testing.assert_close(
            torch.cat(logits, 1), whole[:, begin - 1 :], rtol=1e-4, atol=2e-5
        )
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :PADDING] = 0
        padded = made(ids, attention_mask=mask).logits[0, PADDING:]
        alone = made(ids[:1, PADDING:]).logits[0]
        torch.testing.assert_close(padded, alone, rtol=1e-4, atol=2e-5)
        # each new token beside those before it, whatever transformers' generate calls a cache
        begin, mask = ids[:, PADDING - 3 : PADDING + 5], mask[:, PADDING - 3 :]
        text = made.generate(
            begin, attention_mask=mask[:, :8], max_new_tokens=4, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        whole = made(text.sequences, attention_mask=mask[:, :12]).logits
        torch.testing.assert_close(
            torch.stack(text.logits, 1), whole[:, 7:-1], rtol=1e-4, atol=2e-5
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [x for x in MODELS if x not in HAND_NO_OFFSETS_ON])
def test_packed_texts_stay_apart_and_caches_take_tokens(fla: ModuleType, name: str) -> None:
    made, ids = model(fla, name).eval(), torch.randint(0, 97, (1, 30))
    offsets = torch.tensor([0, 1, 3, 17, 30])
    with torch.no_grad():
        packed = made(ids, cu_seqlens=offsets, use_cache=False).logits
        texts = ids.split(offsets.diff().tolist(), 1)
        apart = torch.cat([made(x, use_cache=False).logits for x in texts], 1)
        torch.testing.assert_close(packed, apart, rtol=1e-4, atol=2e-5)
        if name in ONE_TOKEN_A_STEP:
            return
        past, logits = None, []
        for end, part in zip(offsets[1:].tolist(), texts, strict=True):
            mask = torch.ones(1, end, dtype=torch.long)
            step = made(part, attention_mask=mask, past_key_values=past, use_cache=True)
            past = step.past_key_values
            logits.append(step.logits)
        torch.testing.assert_close(torch.cat(logits, 1), made(ids).logits, rtol=1e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GLA", "GatedDeltaNet", "KDA", "RWKV7", "RetNet"])
def test_model_compiles_whole(fla: ModuleType, name: str) -> None:
    torch.compiler.reset()
    made, ids = model(fla, name).train(), torch.randint(0, 97, (2, LENGTH))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, made(ids, labels=ids, use_cache=False).loss)
    loss.backward()


@pytest.mark.filterwarnings("ignore")
def test_losses_and_attnres_of_a_model(fla: ModuleType) -> None:
    ids = torch.randint(0, 97, (2, LENGTH))
    plain = model(fla, "GLA", fuse_cross_entropy=False)
    want = plain(ids, labels=ids).loss
    for option in ("fuse_cross_entropy", "fuse_linear_cross_entropy"):
        fused = model(fla, "GLA", **{"fuse_cross_entropy": False, option: True})
        torch.testing.assert_close(fused(ids, labels=ids).loss, want)
    assert model(fla, "GLA", use_attnres=True)(ids, labels=ids).loss.isfinite()


def test_models_are_registered_and_others_say_what_is_missing(fla: ModuleType) -> None:
    from transformers import AutoConfig

    assert AutoConfig.for_model("gated_deltanet").model_type == "gated_deltanet"
    whole = importlib.import_module("fla")
    assert whole.GLAForCausalLM is fla.GLAForCausalLM and issubclass(
        whole.KimiDeltaAttention, torch.nn.Module
    )
    assert {f"{name}ForCausalLM" for name in MODELS} <= set(fla.__all__)
    with pytest.raises(ImportError, match=r"fla\.models\.NSAModel: .*Slipstream has no fla\.ops"):
        fla.NSAModel  # noqa: B018


# Slipstream's layers beside fla's, with fla's weights


def weights_of(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Random ones, by name with _ for the dots."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return {name.replace(".", "_"): p.detach() for name, p in layer.named_parameters()}


def _same(p: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {f"{n}_proj.weight": p[f"{n}_proj_weight"] for n in names}


def _convolved(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "qkv_proj.weight": torch.cat([p[f"{n}_proj_weight"] for n in "qkv"]),
        "conv.weight": torch.cat([p[f"{n}_conv1d_weight"] for n in "qkv"]).squeeze(1),
    }


def _kda(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return (
        _convolved(p)
        | _same(p, "b", "o")
        | {
            "f_down.weight": p["f_proj_0_weight"],
            "f_up.weight": p["f_proj_1_weight"],
            "g_down.weight": p["g_proj_0_weight"],
            "g_up.weight": p["g_proj_1_weight"],
            "g_up.bias": p["g_proj_1_bias"],
            "norm_weight": p["o_norm_weight"],
            "A_log": p["A_log"],
            "dt_bias": p["dt_bias"],
        }
    )


def _gated_deltanet(p: dict[str, Tensor]) -> dict[str, Tensor]:
    return _convolved(p) | _same(p, "o") | {
        "ab_proj.weight": torch.cat([p["a_proj_weight"], p["b_proj_weight"]]),
        "z_proj.weight": p["g_proj_weight"], "norm_weight": p["o_norm_weight"],
        "A_log": p["A_log"], "dt_bias": p["dt_bias"],
    }  # fmt: skip


def _rwkv6(p: dict[str, Tensor]) -> dict[str, Tensor]:
    rank = p["x_proj_0_linear_weight"].shape[0] // 5
    return {
        **{f"{n}_proj.weight": p[f"{n}_proj_linear_weight"] for n in "rkvg"},
        "o_proj.weight": p["o_proj_weight"],
        "w_lora.down": p["w_proj_linear_lora_0_weight"].T,
        "w_lora.up": p["w_proj_linear_lora_2_weight"].T,
        "w_lora.bias": p["w_proj_linear_lora_2_bias"],
        "mix_base": p["x_proj_0_mu"],
        "mix": p["x_bias"],
        "mix_down": p["x_proj_0_linear_weight"].T,
        "mix_up": p["x_proj_2_weight"].view(-1, 5, rank).permute(1, 2, 0),
        "bonus": p["bonus"],
        "norm_weight": p["g_norm_weight"],
        "norm_bias": p["g_norm_bias"],
    }


# fla's class and options, ours, and our weights from fla's
LAYERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], Callable[[Any], Any]]] = {
    "delta_net": (
        "DeltaNet", {"num_heads": 4, "use_gate": True}, "DeltaNet",
        {"num_heads": 4, "use_gate": True},
        lambda p: _convolved(p) | _same(p, "b", "g", "o") | {"norm_weight": p["o_norm_weight"]},
    ),
    "gated_deltaproduct": (
        "GatedDeltaProduct",
        {"num_heads": 4, "head_dim": 16, "expand_v": 1, "num_householder": 3,
         "allow_neg_eigval": True},
        "GatedDeltaProduct", {"num_heads": 4, "num_householder": 3},
        lambda p: _convolved(p) | _same(p, "a", "b", "o") | {
            "z_proj.weight": p["g_proj_weight"], "norm_weight": p["o_norm_weight"],
            "A_log": p["A_log"], "dt_bias": p["dt_bias"],
        },
    ),
    "gated_deltanet": (
        "GatedDeltaNet", {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 1},
        "GatedDeltaNet", {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "norm_eps": 1e-5},
        _gated_deltanet,
    ),
    "mamba3": (
        "Mamba3", {"head_dim": 16, "state_size": 24, "n_groups": 2, "use_bias": True}, "Mamba3",
        {"head_dim": 16, "state_size": 24, "n_groups": 2, "use_bias": True},
        lambda p: {
            n.replace("proj_", "proj.").replace("norm_weight", "norm"): x for n, x in p.items()
        },
    ),
    "gated_deltanet without a gate": (
        "GatedDeltaNet",
        {"num_heads": 4, "head_dim": 16, "expand_v": 1, "use_gate": False, "conv_bias": True},
        "GatedDeltaNet",
        {"num_heads": 4, "head_dim": 16, "use_gate": False, "conv_bias": True, "norm_eps": 1e-5},
        lambda p: _convolved(p) | _same(p, "o") | {
            "ab_proj.weight": torch.cat([p["a_proj_weight"], p["b_proj_weight"]]),
            "conv.bias": torch.cat([p[f"{n}_conv1d_bias"] for n in "qkv"]),
            "norm_weight": p["o_norm_weight"], "A_log": p["A_log"], "dt_bias": p["dt_bias"],
        },
    ),
    "kda": (
        "KimiDeltaAttention", {"num_heads": 2, "num_v_heads": 4, "head_dim": 16},
        "KimiDeltaAttention",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "gate_bias": True}, _kda,
    ),
    "kda with a bound": (
        "KimiDeltaAttention",
        {"num_heads": 4, "head_dim": 16, "safe_gate": True, "lower_bound": -4.0,
         "allow_neg_eigval": True},
        "KimiDeltaAttention",
        {"num_heads": 4, "head_dim": 16, "gate_bias": True, "lower_bound": -4.0,
         "allow_neg_eigval": True}, _kda,
    ),
    "gdn2": (
        "GatedDeltaNet2",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "allow_neg_eigval": True},
        "GatedDeltaNet2",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "gate_bias": True,
         "allow_neg_eigval": True},
        lambda p: {n: x for n, x in _kda(p).items() if n != "b_proj.weight"} | {
            "bw_proj.weight": torch.cat([p["b_proj_weight"], p["w_proj_weight"]])
        },
    ),
    "retention": (
        "MultiScaleRetention", {"num_heads": 4, "expand_k": 1.0, "expand_v": 2.0},
        "MultiScaleRetention", {"num_heads": 4, "norm_affine": True},
        lambda p: _same(p, "q", "k", "v", "g", "o") | {
            "norm_weight": p["g_norm_swish_gate_weight"]
        },
    ),
    "gla": (
        "GatedLinearAttention", {"num_heads": 4}, "GatedLinearAttention", {"num_heads": 4},
        lambda p: _same(p, "q", "k", "v", "g", "o") | {
            "gk_down.weight": p["gk_proj_0_weight"], "gk_up.weight": p["gk_proj_1_weight"],
            "gk_up.bias": p["gk_proj_1_bias"], "norm_weight": p["g_norm_swish_gate_weight"],
        },
    ),
    "forgetting_attn": (
        "ForgettingAttention", {"num_heads": 4, "num_kv_heads": 2, "use_output_gate": True},
        "ForgettingAttention", {"num_heads": 4, "num_kv_heads": 2, "output_gate": True},
        lambda p: _same(p, "f", "g", "o") | {
            "qkv_proj.weight": torch.cat([p[f"{n}_proj_weight"] for n in "qkv"]),
            "f_proj.bias": p["f_proj_bias"],
        },
    ),
    "hgrn": (
        "HGRNAttention", {}, "HGRN", {},
        lambda p: _same(p, "i", "f", "g", "o") | {"norm_weight": p["g_norm_weight"]},
    ),
    "hgrn2": (
        "HGRN2Attention", {"expand_ratio": 16}, "HGRN2", {"num_heads": 4},
        lambda p: _same(p, "q", "f", "i", "o") | {"norm_weight": p["g_norm_weight"]},
    ),
    "gsa": (
        "GatedSlotAttention", {"num_heads": 4, "num_slots": 8}, "GatedSlotAttention",
        {"num_heads": 4, "num_slots": 8},
        lambda p: _same(p, "q", "k", "v", "f", "o") | {"norm_weight": p["g_norm_weight"]},
    ),
    "rwkv6": (
        "RWKV6Attention",
        {"num_heads": 4, "expand_k": 1.0, "proj_low_rank_dim": 8, "gate_low_rank_dim": 16},
        "RWKV6", {"num_heads": 4, "mix_low_rank_dim": 8, "decay_low_rank_dim": 16}, _rwkv6,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_fla_with_its_weights(fla: ModuleType, name: str) -> None:
    theirs_name, their_options, ours_name, our_options, convert = LAYERS[name]
    torch.manual_seed(0)
    module = importlib.import_module("fla.layers")
    theirs = getattr(module, theirs_name)(hidden_size=64, layer_idx=0, **their_options)
    ours = getattr(slipstream.layers, ours_name)(64, **our_options)
    ours.load_state_dict(convert(weights_of(theirs)))
    x = torch.randn(2, 70, 64)
    # fla's forward of Mamba-3 refuses a CPU, and compat's kernels run there
    whole = theirs.cuda_kernels_forward if name == "mamba3" else theirs
    torch.testing.assert_close(ours(x)[0], whole(x)[0], rtol=1e-4, atol=1e-5)
