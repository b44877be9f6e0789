"""convert by itself: every family there and back, what is refused, what is left on the disk."""

import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.models.convert import FAMILIES, convert, families, files
from tests.support.conversion import randomize

# the keys of a small config of each family; test_convert_fla.py has more of fla's
GLA = {"num_heads": 4}
HEADS = {"num_heads": 2, "num_v_heads": 4, "head_dim": 8}
MOE = {"moe_intermediate_size": 8, "num_experts": 3, "intermediate_size": 24}
HYBRID = {"num_attention_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL: dict[str, dict[str, Any]] = {
    "gla": GLA,
    "retnet": GLA,
    "delta_net": GLA,
    "gated_deltanet": HEADS,
    "kda": HEADS,
    "forgetting_transformer": {"num_heads": 4, "num_kv_heads": 2, "use_output_gate": True},
    "rwkv7": {"head_dim": 8, "decay_low_rank_dim": None},
    "fla_mamba2": {"head_dim": 16, "state_size": 8},
    "mamba3": {
        "head_dim": 16,
        "state_size": 8,
        "is_mimo": True,
        "mimo_rank": 2,
        "is_outproj_norm": True,
    },
    "mamba2": {
        "head_dim": 16,
        "state_size": 8,
        "num_heads": 4,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
    },
    "qwen3_next": {
        **HYBRID,
        **MOE,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 8,
    },
    "kimi_linear": {
        **HYBRID,
        **MOE,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "num_experts_per_token": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
}


def config_of(name: str) -> dict[str, Any]:
    given = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, **SMALL[name]}
    return {**given, "model_type": FAMILIES[name].model_type}


# what transformers' classes make of other keys where it is not given
DERIVED = ("num_heads", "num_key_value_heads", "layer_types", "mlp_layer_types")
DERIVED = (*DERIVED, "mlp_only_layers", "rope_parameters")


def defaults_of_theirs(name: str) -> dict[str, Any]:
    """Of the class that writes the config.json; fla's is not there."""
    kind = FAMILIES[name].model_type
    if name in ("mamba2", "qwen3_next", "kimi_linear"):
        return {key: x for key, x in vars(CONFIG_MAPPING[kind]()).items() if key not in DERIVED}
    snapshot = Path(__file__).parents[1] / "compat/fla_signatures.json"
    scope: dict[str, Any] = {}
    exec(f"def init{json.loads(snapshot.read_text())['configs'][kind]}: ...", scope)
    return {x.name: x.default for x in signature(scope["init"]).parameters.values()}


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_left_out_have_their_defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    make = families.ForeignConfig.__init__

    def note(self: Any, given: Any, defaults: dict[str, Any], *rest: Any) -> None:
        found.update(defaults)
        make(self, given, defaults, *rest)

    monkeypatch.setattr(families.ForeignConfig, "__init__", note)
    FAMILIES[name].read(config_of(name))
    theirs = defaults_of_theirs(name)
    shared = found.keys() & theirs.keys()
    assert len(shared) > 10
    assert {x: found[x] for x in shared} == {x: theirs[x] for x in shared}


def test_kimi_attends_in_every_fourth_layer_but_the_first() -> None:
    mixers = FAMILIES["kimi_linear"].read({"num_hidden_layers": 10})["mixers"]
    assert [i for i, x in enumerate(mixers) if x["type"] == "mla"] == [4, 8]


@pytest.mark.parametrize(
    ("name", "keys", "ranks", "inner"),
    [
        ("rwkv7", {"head_dim": 64}, (128, 224, 128, 64), 8192),
        ("rwkv7", {"head_dim": 128, "hidden_ratio": 3.0}, (224, 224, 224, 160), 6144),
        ("gla", {}, None, 5632),
        ("retnet", {}, None, 2816),
        ("kda", {"hidden_ratio": 3}, None, 4096),
    ],
)
def test_sizes_left_out_follow_from_the_width(
    name: str, keys: dict[str, Any], ranks: tuple[int, ...] | None, inner: int
) -> None:
    given = dict.fromkeys(f"{x}_low_rank_dim" for x in ("decay", "gate", "a", "v") if ranks)
    given |= {"model_type": name, "hidden_size": 2048, "num_hidden_layers": 1, **keys}
    found = FAMILIES[name].read(dict(given))
    assert found["intermediate_size"] == inner
    (mixer,) = found["mixers"]
    assert ranks is None or tuple(mixer[x] for x in given if x.endswith("rank_dim")) == ranks


def saved(folder: Path, name: str, **changes: Any) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    options = {**FAMILIES[name].read(config_of(name)), **changes}
    model = SlipstreamForCausalLM(SlipstreamConfig(**options))
    randomize(model)
    model.save_pretrained(folder)
    return model


def change(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shard_bytes", [3_000, 10**9])
def test_every_family_there_and_back(name: str, shard_bytes: int, tmp_path: Path) -> None:
    ours = saved(tmp_path / "ours", name)
    (tmp_path / "ours" / "tokenizer.json").write_text("{}")
    convert(tmp_path / "ours", tmp_path / "theirs", name, shard_bytes=shard_bytes)
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert theirs["model_type"] == FAMILIES[name].model_type
    convert(tmp_path / "theirs", tmp_path / "again", shard_bytes=shard_bytes)
    again = SlipstreamForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again.state_dict(), ours.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    assert (tmp_path / "again" / "modeling_slipstream.py").is_file()
    assert not list(tmp_path.glob("*.partial"))


def test_files_are_as_large_as_allowed(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(1), "d": torch.zeros(9)}
    assert files.write(tmp_path, iter(tensors.items()), 32) == 72
    shards = [{*load_file(x)} for x in sorted(tmp_path.glob("*.safetensors"))]
    assert shards == [{"a", "b"}, {"c"}, {"d"}]


def test_dtypes_stay(tmp_path: Path) -> None:
    model = saved(tmp_path / "ours", "gated_deltanet").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    convert(tmp_path / "narrow", tmp_path / "theirs", "gated_deltanet")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert {x.dtype for x in theirs.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["dtype"] == "bfloat16"
    convert(tmp_path / "theirs", tmp_path / "again")
    assert SlipstreamForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gla", {"attnres_block_size": 2}, r"attnres_block_size: .* can be None .* has 2"),
        ("gla", {"use_gv": True}, "use_gv: .* can be False"),
        ("gla", {"feature_map": "dpfp"}, "feature_map: .*'dpfp'"),
        ("gla", {"hidden_act": "gelu"}, "hidden_act: .* can be 'swish' or 'silu'"),
        ("gla", {"new_option": 3}, "new_option: no known key .*--ignore new_option"),
        ("gla", {"expand_k": 0.3}, "num_heads"),
        ("gla", {"num_hidden_layers": None}, "num_hidden_layers: want a value that a gla model"),
        ("retnet", {"num_heads": 0}, "num_heads: want a value .*, got 0"),
        ("mamba2", {"time_step_limit": 3, "expand": None}, r"config\.json: of no mamba2 model"),
        ("qwen3_next", {"head_dim": "x"}, "head_dim: want a value .*, got 'x'"),
        ("retnet", {"use_short_conv": True}, "use_short_conv"),
        ("delta_net", {"expand_v": 0.9}, "expand_v: want a whole number of features, got 7.2"),
        ("kda", {"safe_gate": True}, "safe_gate: want a lower_bound"),
        ("rwkv7", {"attn": {"layers": [0], "num_heads": 2}}, "attn: "),
        ("rwkv7", {"value_dim": 64}, "value_dim"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("mamba3", {"mimo_rank": 1}, "mimo_rank: want 2 or more, got 1"),
        ("forgetting_transformer", {"qk_norm": True}, "qk_norm: .* can be False"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias"),
        (
            "qwen3_next",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters: .*'yarn'",
        ),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ],
)
def test_configs_without_a_place_are_refused(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path / "ours", name)
    convert(tmp_path / "ours", tmp_path / "theirs", name)
    with pytest.raises(ValueError, match=message):
        convert(change(tmp_path / "theirs", **keys), tmp_path / "again")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gla",
            {"mixers": [{"type": "gla", "gate_low_rank_dim": 8, "norm_eps": 1e-6}] * 2},
            r"mixers\[0\].gate_low_rank_dim: gla has no place for 8",
        ),
        ("gla", {"mixers": ["gla", {"type": "gla", "expand_k": 1.0}]}, r"mixers\[1\].expand_k"),
        ("gla", {"mixers": ["kda", "kda"]}, "gla has layers of gla, and this model has none"),
        (
            "gla",
            {"mixers": [{"type": "gla", "norm_eps": 1e-6}, "mla"]},
            r"mixers\[1\]: gla has no place for 'mla'",
        ),
        ("gla", {"mlps": ["swiglu", "none"]}, r"mlps\[1\]: gla has no place for 'none'"),
        ("gla", {"norm": "layer"}, "norm: gla has no place for 'layer'"),
        ("gla", {"embedding_norm": True}, "embedding_norm"),
        ("mamba2", {"norm": "zero_centered_rms"}, "norm: "),
        ("mamba3", {"mixers": [{"type": "mamba3", "rotary_fraction": 0.25}] * 2}, "fla has 0.5"),
        (
            "mamba3",
            {"mixers": [{"type": "mamba3", "A_activation": "heavy_tail"}] * 2},
            "heavy_tail",
        ),
        ("forgetting_transformer", {"mixers": ["forgetting_attn", "attention"]}, "attn: "),
        ("qwen3_next", {"norm": "rms"}, "norm: "),
    ],
)
def test_models_without_a_place_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path / "ours", name, **changes)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "ours", tmp_path / "theirs", name)
    assert [x.name for x in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize(
    ("drop", "rename", "message"),
    [
        ("lm_head.weight", None, "weights: missing in the checkpoint: lm_head.weight"),
        (None, "model.other.weight", "weights: unexpected in the checkpoint: model.other.weight"),
    ],
)
def test_wrong_weights_are_refused(
    drop: str | None, rename: str | None, message: str, tmp_path: Path
) -> None:
    saved(tmp_path / "ours", "gla", tie_word_embeddings=False)
    convert(tmp_path / "ours", tmp_path / "theirs", "gla")
    path = tmp_path / "theirs" / "model.safetensors"
    state = load_file(path)
    if drop is not None:
        del state[drop]
    if rename is not None:
        state[rename] = torch.zeros(2)
    save_file(state, path)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "theirs", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_other_shapes_leave_nothing_behind(tmp_path: Path) -> None:
    saved(tmp_path / "ours", "gla")
    convert(tmp_path / "ours", tmp_path / "theirs", "gla")
    change(tmp_path / "theirs", intermediate_size=64)
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight: want shape \(64, 32\)"):
        convert(tmp_path / "theirs", tmp_path / "again")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["ours", "theirs"]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    saved(tmp_path / "ours", "gla")
    (tmp_path / "theirs.partial").mkdir()
    convert(tmp_path / "ours", tmp_path / "theirs", "gla")
    assert (tmp_path / "theirs.partial").is_dir()
    weights = tmp_path / "ours" / "model.safetensors"
    whole = weights.read_bytes()
    for end in (5, 100, len(whole) - 7):
        weights.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"model.safetensors: no whole file of safetensors"):
            convert(tmp_path / "ours", tmp_path / "again", "gla")
    for file in ("missing.safetensors", "../theirs/model.safetensors"):
        index = json.dumps({"weight_map": {"lm_head.weight": file}})
        (tmp_path / "ours" / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=r"index.json: names .*, which is not beside it"):
            convert(tmp_path / "ours", tmp_path / "again", "gla")
    assert not (tmp_path / "again").exists()


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"want a directory with a config.json"):
        convert(tmp_path / "nothing", tmp_path / "ours")
    saved(tmp_path / "ours", "gla")
    with pytest.raises(ValueError, match=r"to: want one of gla, .*got 'slipstream'"):
        convert(tmp_path / "ours", tmp_path / "again")
    with pytest.raises(ValueError, match=r"to: want one of gla, .*got 'glaa'"):
        convert(tmp_path / "ours", tmp_path / "again", "glaa")
    with pytest.raises(FileExistsError, match="want a directory that does not exist yet"):
        convert(tmp_path / "ours", tmp_path, "gla")
    convert(tmp_path / "ours", tmp_path / "theirs", "gla")
    with pytest.raises(ValueError, match="to: want 'slipstream' for a gla checkpoint, got 'kda'"):
        convert(tmp_path / "theirs", tmp_path / "again", "kda")
    with pytest.raises(ValueError, match=r"model_type: want slipstream or one of gla.*got 'llama'"):
        convert(change(tmp_path / "theirs", model_type="llama"), tmp_path / "again")
    (tmp_path / "ours" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"want model.safetensors or"):
        convert(tmp_path / "ours", tmp_path / "again", "gla")
