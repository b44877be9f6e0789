"""Models of transformers with linear layers: as they are, with fla, and patched.

    python bench/transformers_models.py                     0.35 B, on a GPU
    python bench/transformers_models.py --only "kimi.*patched"
    python bench/transformers_models.py --cpu               four layers of each on this CPU

The kinds of Qwen3-Next, Kimi-Linear and Nemotron-H, without experts, and four layers of those whose
mixers have loops of their own. torch: plain torch, where transformers falls back to it. fla: its
kernels, where they are installed. patched: slipstream.integrations.transformers.patch() and
attn_implementation="slipstream".

train ms: forward, backward and AdamW of one row, bf16, the median of some steps (CPU: float32, and
time of the processor, with one thread); fastest ms: of the fastest of them, far below the median
where something else kept the host busy. xLSTM's are under autocast, without which transformers'
own fails from 64 tokens on.
prefill ms: a prompt of as many tokens, with a cache.
tokens/s: generate, eager and greedy, after a prompt of 128, without the time of the prompt; the
median of up to three runs.
Each way is a process, for functions of fla are looked up as a model is imported. All compile at
once and are then measured one after another, on each GPU; the host should be quiet then, for it
takes longer to launch a step than the GPU to run it. --once beforehand compiles beside other work.
Of fla's tiles one is taken untried, for trying them all takes minutes: --tune tries them.
"""

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty
from typing import Any

import torch
from harness import BF16, DEVICE, Call, Report, first, parser
from processes import Child, take_first_tiles, tell
from torch import Tensor

QWEN3_NEXT: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "num_experts": 0,
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "linear_num_heads": 8, "linear_head_dim": 128, "mlp_layer_types": ["dense"] * 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 32, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8,
    "layers_block_type": [
        *["linear_attention", "mlp"] * 4, "full_attention", *["linear_attention", "mlp"] * 5,
        "full_attention", *["linear_attention", "mlp"] * 5, "full_attention",
        *["linear_attention", "mlp"] * 4,
    ],
}  # fmt: skip
# four layers of those whose plain torch loops over tokens, of which a step takes seconds
MINIMAX: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 1408, "num_hidden_layers": 4, "head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 2,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
RECURRENT_GEMMA: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 6144, "num_hidden_layers": 4, "lru_width": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 1,
}  # fmt: skip
RWKV: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 4, "context_length": 4096}
XLSTM: dict[str, Any] = {
    "hidden_size": 1024, "embedding_dim": 1024, "num_hidden_layers": 4, "num_blocks": 4,
    "num_heads": 4,
}  # fmt: skip
ZAYA: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 2, "num_experts": 2, "moe_intermediate_size": 1408,
}  # fmt: skip
# four layers of those with hyper-connections
_MLA: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 512, "kv_lora_rank": 256,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 1408, "hc_mult": 4,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "mlp_layer_types": ["dense"] * 4,
    "index_topk": 512, "index_head_dim": 64, "index_n_heads": 4,
}  # fmt: skip
HY_V4: dict[str, Any] = {**_MLA, "qk_rope_head_dim": 64, "indexer_types": ["full"] * 4}
GLM5_NEXT: dict[str, Any] = {
    **_MLA, "qk_rope_head_dim": 0, "linear_head_dim": 128, "linear_num_heads": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention"], "indexer_types": ["full"] * 4,
}  # fmt: skip
DEEPSEEK_V4: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 1, "q_lora_rank": 512, "o_groups": 2, "o_lora_rank": 256, "hc_mult": 4,
    "moe_intermediate_size": 1408, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "layer_types": ["sliding_attention"] * 4, "mlp_layer_types": ["moe"] * 4,
}  # fmt: skip
QWEN4_EXP: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 2, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 1408, "num_experts": 2,
    "num_experts_per_tok": 1, "hc_count": 4, "hc_lowrank": 64, "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 512,
    "indexer_compress_ratio": 64,
}  # fmt: skip
MODELS = {
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT),
    "kimi_linear": ("KimiLinear", KIMI_LINEAR),
    "nemotron_h": ("NemotronH", NEMOTRON_H),
    "minimax": ("MiniMax", MINIMAX),
    "recurrent_gemma": ("RecurrentGemma", RECURRENT_GEMMA),
    "rwkv": ("Rwkv", RWKV),
    "xlstm": ("xLSTM", XLSTM),
    "zaya": ("Zaya", ZAYA),
    "deepseek_v4": ("DeepseekV4", DEEPSEEK_V4),
    "hy_v4": ("HYV4", HY_V4),
    "glm5_next": ("Glm5Next", GLM5_NEXT),
    "qwen4_exp": ("Qwen4Exp", QWEN4_EXP),
}
COMMON: dict[str, Any] = {"vocab_size": 32000, "tie_word_embeddings": True, "pad_token_id": 0}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
SMALL_OWN: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "kimi_linear": {
        "linear_num_heads": 2, "linear_head_dim": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "recurrent_gemma": {"lru_width": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
}  # fmt: skip
# on a CPU, and for --small
FOUR_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4},
    "kimi_linear": {
        "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}  # fmt: skip
WAYS = ("patched", "fla", "torch")  # the slowest last
PROMPT, DECODED, ROWS = 128, 24, (1, 16)
WARM_UP = 3  # steps
# steps and runs of generate: at least the first number, until the seconds are over or the last is
STEPS, RUNS = (1, 3.0, 20), (1, 3.0, 3)
# of the time that is left, how much compilers may take before those that are ready are measured
COMPILING = 0.65
ROW = threading.Lock()
PEERS = ("fla", "causal_conv1d", "mamba_ssm")


def prepare(way: str) -> None:
    """Before transformers' models are imported."""
    if way != "fla":
        for package in PEERS:
            sys.modules[package] = None  # pyright: ignore[reportArgumentType]
    if way == "patched":
        from slipstream.integrations.transformers import patch

        patch()


def has_fla(kind: str) -> bool:
    from importlib.util import find_spec

    return (
        kind in ("qwen3_next", "kimi_linear")
        and find_spec("fla") is not None
        and DEVICE.type == "cuda"
    )


def model_of(kind: str, way: str, small: bool, dtype: torch.dtype, **other: Any) -> Any:
    """other: sizes in place of those above."""
    import transformers

    prefix, sizes = MODELS[kind]
    fewer = FOUR_LAYERS.get(kind, {}) if small or DEVICE.type == "cpu" else {}
    sizes = {
        **sizes,
        **COMMON,
        **fewer,
        **(SMALL | SMALL_OWN.get(kind, {}) if small else {}),
        **other,
    }
    model: Any = getattr(transformers, f"{prefix}ForCausalLM", None)
    if model is None:  # with images, of which a model of text makes no use
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")
        sizes = {"text_config": sizes, "vision_config": {"depth": 1}}
    config = model.config_class(**sizes)
    if way == "patched" or model._supports_sdpa:
        config._attn_implementation = "slipstream" if way == "patched" else "sdpa"
    return model(config).to(DEVICE, dtype)


def vocabulary(model: Any) -> int:
    return model.config.get_text_config().vocab_size


def made(kind: str, way: str, small: bool) -> Any:
    """On the device: its 0.35 B numbers take a processor seconds."""
    with DEVICE:
        return model_of(kind, way, small, torch.float32 if DEVICE.type == "cpu" else BF16)


def spent(call: Call) -> float:
    """Seconds of a call; on a CPU those of its cores, which others may share."""
    if DEVICE.type == "cuda":
        return first(call)
    start = time.process_time()
    call()
    return time.process_time() - start


def repeated(call: Call, least: int, seconds: float, most: int) -> list[float]:
    """Seconds of each of some calls."""
    found: list[float] = []
    while len(found) < least or (sum(found) < seconds and len(found) < most):
        found.append(spent(call))
    return found


class Training:
    """Steps of one row of tokens."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model = model.train()
        self.ids = torch.randint(3, vocabulary(model), (1, tokens), device=DEVICE)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.autocast = model.config.model_type == "xlstm" and DEVICE.type == "cuda"

    def step(self) -> None:
        with torch.autocast(DEVICE.type, BF16, enabled=self.autocast):
            loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def prompts(model: Any, B: int) -> Tensor:
    return torch.randint(3, vocabulary(model), (B, PROMPT), device=DEVICE)


@torch.no_grad()
def generate(model: Any, ids: Tensor, count: int) -> None:
    lengths = {"min_new_tokens": count, "max_new_tokens": count}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)


def decode_seconds(model: Any, B: int, tokens: int) -> float:
    """Seconds of `tokens` steps of generate, without those of the prompt and the first."""
    ids = prompts(model, B)
    generate(model, ids, 2)
    runs = [repeated(partial(generate, model, ids, x), *RUNS) for x in (tokens + 1, 1)]
    return statistics.median(runs[0]) - statistics.median(runs[1])


def first_step(kind: str, way: str, small: bool, tokens: int) -> tuple[float, str]:
    """Its seconds, most of them of compilers, and the error if it failed; generate's kernels are
    compiled too. Nothing stays on the GPU, which many processes share."""
    model = made(kind, way, small)
    try:
        return spent(Training(model, tokens).step), ""
    except RuntimeError as error:  # fla refuses some gradients on Hopper
        return 0.0, " ".join(str(error).split())[:150]
    finally:
        for B in ROWS if DEVICE.type == "cuda" else ():
            generate(model.eval(), prompts(model, B), 2)
        del model
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def child(kind: str, way: str, mode: str, tunes: bool) -> None:
    """Compiles, waits for a line, measures."""
    if not tunes and DEVICE.type == "cuda":
        take_first_tiles()
    small, cpu = mode == "small", DEVICE.type == "cpu"
    tokens = 32 if small else 256 if cpu else 2048
    decoded = 2 if small else 8 if cpu else DECODED
    prepare(way)
    torch.manual_seed(0)
    # plain torch has nothing to compile, and its steps take the most memory
    first_s, note = (0.0, "") if way == "torch" else first_step(kind, way, small, tokens)
    tell(ready=True)
    sys.stdin.readline()
    model = made(kind, way, small)
    cells: dict[str, Any] = {"parameters": sum(x.numel() for x in model.parameters())}
    cells |= {"tokens": tokens, "note": note}
    if not note:
        training = Training(model, tokens)
        for _ in range(1 if small or way == "torch" else WARM_UP):
            training.step()
        seconds = repeated(training.step, *((1, 0, 1) if small else STEPS))
        cells["train ms"] = round(1e3 * statistics.median(seconds), 2)
        cells["fastest ms"] = round(1e3 * min(seconds), 2)
        del training
    tell(**cells)
    model.eval()
    if not note:
        ids = torch.randint(3, vocabulary(model), (1, tokens), device=DEVICE)
        prefill = torch.no_grad()(partial(model, ids, use_cache=True))
        prefill()
        cells = {"prefill ms": round(1e3 * statistics.median(repeated(prefill, *STEPS)), 2)}
        tell(**cells)
    for B in ROWS[:1] if cpu else ROWS:
        seconds = decode_seconds(model, B, decoded)
        tell(**{f"B{B} tokens/s": round(B * decoded / max(seconds, 1e-9), 1)})
    tell(**{"first s": round(first_s, 1)})


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--cpu", action="store_true", help="on this CPU")
    options.add_argument("--tune", action="store_true", help="let fla try its tiles")
    options.add_argument("--child", nargs=3, help="one process: kind, way, mode")
    given = options.parse_args(arguments)
    if given.child:
        kind, way, mode = given.child
        child(kind, way, mode, given.tune)
        return
    report = Report(given, needs_gpu=not given.cpu)
    mode = "small" if given.small else "full"
    tune = ["--tune"] if given.tune else []
    wanted = [
        (kind, way)
        for way in WAYS
        for kind in MODELS
        if given.only.search(f"{kind} {way}") and (way != "fla" or has_fla(kind))
    ]
    alone = given.cpu or given.small  # one after another: they share cores and memory
    for some in [[x] for x in wanted] if alone else [wanted]:
        measure(report, [Child(__file__, (*x, mode, *tune), i) for i, x in enumerate(some)])
    report.end()


def measure(report: Report, children: list[Child]) -> None:
    """Once all are ready or have had their time, each in turn has its GPU for itself."""
    limit = report.start + report.options.seconds
    begun = time.perf_counter()
    until = begun + (1 if report.options.once else COMPILING) * (limit - begun)
    ready = []
    for one in children:
        told, late = next_of(one, until)
        if told is None:
            report.failures.append(f"{one.name}: {'not ready in time' if late else one.failure()}")
            print(report.failures[-1][:600], flush=True)
            one.end()
        else:
            ready.append(one)

    def of_gpu(gpu: int) -> None:
        for one in ready:
            if one.gpu == gpu:
                measure_one(report, one, limit)

    with ThreadPoolExecutor() as pool:
        list(pool.map(of_gpu, {x.gpu for x in ready}))


def measure_one(report: Report, one: Child, limit: float) -> None:
    kind, way = one.name.split()[:2]
    cells: dict[str, Any] = {"model": kind, "way": way}
    if not report.options.once:
        one.say()
        told, late = next_of(one, limit)
        while told is not None:
            cells |= told
            told, late = next_of(one, limit)
        if late or "first s" not in cells:
            last = "out of time" if late else one.failure()
            report.failures.append(f"{one.name}: {last}; {cells}")
            print(report.failures[-1][:600], flush=True)
            cells = {}
    if cells:
        with ROW:
            report.row("transformers_models", cells)
    one.end()


def next_of(one: Child, until: float) -> tuple[dict[str, Any] | None, bool]:
    """The child's next message, None if nothing comes; and whether that is for want of time."""
    try:
        seconds = max(until - time.perf_counter(), 0.01)
        return one.next(None if until == float("inf") else seconds), False
    except Empty:
        return None, True


if __name__ == "__main__":
    main()
