"""Losses of our models beside fla's, from the same initialisations on the same data.

    python bench/convergence.py                        every model, three seeds
    python bench/convergence.py --only kda --steps 500 --seeds 4

gated_deltanet and kda are models of 0.1 B (12 layers, hidden size 768, 6 heads of 128). fla's model
is made by its own class and trained by its own kernels; ours begins with its weights, by
slipstream.models.convert. qwen3_next is transformers' model of that size without experts: "fla" is
as it is, with fla's kernels, and ours the same one patched (integrations.transformers).

The bytes of Python's own library, 8 rows of 512, AdamW on float32 weights under bf16 autocast. Each
run is a process, four at a time on a GPU, and the first of a kind compiles for the others; of fla's
tiles one is taken as it is, for trying all of them takes minutes and changes no result but its
rounding. Where fla refuses the gradient of the gated delta rule (on Hopper with Triton 3.4 to
3.7.0, unless TileLang is installed), its model runs its definition of the rule in plain torch, and
qwen3_next is transformers' in plain torch.

loss: of train the mean over the last 50 steps, nats a byte; of held-out over 64 rows; of
all-held-out over all of that text, at the end. The gap of ours to fla, mean over the seeds, should
be no larger than that between fla's seeds, mean over all pairs (one may be near by chance), at the
last step that all reached: tools/table_specs.py.
How much of a gap is chance, "moved" shows: fla's model once more from the same seed, each weight
off by a millionth.
"""

import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers_models
from harness import DEVICE, Report, parser
from processes import Child, gpus, take_first_tiles, tell
from torch import Tensor

# fla's names
MODELS = {"gated_deltanet": "GatedDeltaNet", "kda": "KDA", "qwen3_next": ""}
ROWS, TOKENS, EVERY, HELD_OUT_EVERY, HELD_OUT_ROWS = 8, 512, 50, 100, 64
LEARNING_RATE, WARM_UP = 6e-4, 100
CAPTURED = 3  # step that becomes a graph
AT_ONCE = 4  # runs on a GPU: one computes while others import, compile and capture
MOVED = 1e-6  # of each weight, of fla's other run from a seed
AGAIN = 3  # seeds that have one
CUDA = DEVICE.type == "cuda"
SIZES: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048, "vocab_size": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
OF_FLA: dict[str, Any] = {"num_heads": 6, "head_dim": 128, "expand_v": 1}
QWEN3_NEXT = {"num_attention_heads": 6, "linear_num_key_heads": 6, "linear_num_value_heads": 6}
SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
SMALL |= {"num_heads": 2, "head_dim": 16}
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True, "capturable": CUDA}


def text(small: bool) -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py" if small else "**/*.py"))
    joined = b"".join(x.read_bytes() for x in files if "site-packages" not in x.parts)
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
    cut = len(data) * 49 // 50
    return data[:cut], data[cut:]


def rows(data: Tensor, count: int, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(data) - tokens, (count, 1), generator=generator)
    return data[begins + torch.arange(tokens)].long().to(DEVICE)


def fla_refuses() -> bool:
    """fla raises in the gradient of the gated delta rule here."""
    if not CUDA:
        return True
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x = torch.zeros(1, 64, 6, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.zeros(1, 64, 6, device=DEVICE)
    try:
        chunk_gated_delta_rule(x, x, x, gate, gate)[0].sum().backward()
    except RuntimeError:
        return True
    return False


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without autocast, which would round its products to bf16."""

    def call(*args: Any, **options: Any) -> Any:
        with torch.autocast(DEVICE.type, enabled=False):
            return function(*args, **options)

    return call


def recurrence_of_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **raw: Any
) -> tuple[Tensor, None]:
    """fla's definition of the gated delta rule in plain torch, as its layer calls the kernel."""
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    q, k = (x.float() * (x.float().square().sum(-1, True) + 1e-6).rsqrt() for x in (q, k))
    g = -raw["A_log"].float().exp() * F.softplus(g.float() + raw["dt_bias"])
    o, _ = naive_chunk_gated_delta_rule(q, k, v.float(), g, beta.float().sigmoid())
    return o.to(v.dtype), None


def model_of(name: str, run: str, small: bool) -> Any:
    """run: ours, fla or moved, and a seed."""
    who, seed = run.split()
    torch.manual_seed(int(seed))
    if name == "qwen3_next":
        way = "patched" if who == "ours" else "torch" if fla_refuses() else "fla"
        transformers_models.prepare(way)
        if way == "torch":
            from transformers.models.qwen3_next import modeling_qwen3_next as modeling

            plain = modeling.torch_chunk_gated_delta_rule
            modeling.torch_chunk_gated_delta_rule = in_float32(plain)
        sizes = {"vocab_size": SIZES["vocab_size"]} if small else SIZES | QWEN3_NEXT
        return transformers_models.model_of(name, way, small, torch.float32, **sizes)
    import fla.layers.gated_deltanet
    import fla.models

    from slipstream.models import SlipstreamForCausalLM
    from slipstream.models.convert import convert

    sizes = {**SIZES, **OF_FLA, **(SMALL if small else {})}
    config = getattr(fla.models, f"{MODELS[name]}Config")(**sizes)
    model = getattr(fla.models, f"{MODELS[name]}ForCausalLM")(config)
    if who != "ours":
        if name == "gated_deltanet" and fla_refuses():
            fla.layers.gated_deltanet.chunk_gated_delta_rule = in_float32(recurrence_of_fla)
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/fla")
        convert(f"{folder}/fla", f"{folder}/ours")
        return SlipstreamForCausalLM.from_pretrained(f"{folder}/ours")


class Run:
    """A model in training, and its losses so far.

    On a GPU the host takes longer to launch a step than the step takes: after the first few it is
    replayed from a graph, or goes on as before where that cannot be captured, which `refusal` says.
    """

    def __init__(self, model: Any, steps: int) -> None:
        self.model = model.to(DEVICE).train()
        self.steps, self.losses, self.refusal = steps, list[Tensor](), ""
        self.replay: Callable[[Tensor], Tensor] | None = None
        self.rate = torch.zeros((), device=DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.rate, **ADAMW)

    def step(self, ids: Tensor) -> None:
        i, warm = len(self.losses), min(WARM_UP, self.steps)
        self.rate.fill_(LEARNING_RATE * min((i + 1) / warm, 1 - 0.9 * i / self.steps))
        if i == CAPTURED and CUDA:
            try:
                self.replay = self.captured(ids)
            except RuntimeError as error:
                self.refusal = " ".join(str(error).split())[:150]
                self.optimizer.zero_grad()
        self.losses.append((self.replay or self.update)(ids))
        if self.replay is None:
            self.optimizer.zero_grad()

    def update(self, ids: Tensor) -> Tensor:
        loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def captured(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        graph, kept = torch.cuda.CUDAGraph(), ids.clone()
        with torch.cuda.graph(graph):
            loss = self.update(kept)

        def replay(ids: Tensor) -> Tensor:
            kept.copy_(ids)
            graph.replay()
            return loss.clone()

        return replay

    def loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return self.model(ids, labels=ids, use_cache=False).loss

    def recent(self) -> float:
        return torch.stack(self.losses[-EVERY:]).mean().item()

    def held_out(self, batches: Sequence[Tensor]) -> float:
        with torch.no_grad():
            return torch.stack([self.loss(x.to(DEVICE)) for x in batches]).mean().item()


def child(name: str, run: str, steps: int, report: Report) -> None:
    """Makes a model, waits for a line, trains it."""
    small = report.options.small
    tokens, every = 64 if small else TOKENS, min(EVERY, steps)
    if CUDA:
        take_first_tiles()
    train, held = text(small)
    model = model_of(name, run, small)
    if run.startswith("moved"):
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(1 + MOVED * torch.randn_like(x))
    tell(ready=True)
    sys.stdin.readline()
    training = Run(model, steps)
    unseen = rows(held, ROWS if small else HELD_OUT_ROWS, tokens, 0)
    whole = [unseen.cpu()] if small else held.split(ROWS * tokens)[:-1]
    done = 0
    while done < steps and (done == 0 or report.wants(name)):
        for _ in range(every):
            training.step(rows(train, ROWS, tokens, done))
            if done == 0:  # which compiles
                tell(model=name, run=run, step=1, part="first", loss=f"{training.recent():.4f}")
            done += 1
        if training.refusal:
            tell(model=name, run=run, step=done, part="first", loss=training.refusal)
            training.refusal = ""
        tell(model=name, run=run, step=done, part="train", loss=f"{training.recent():.4f}")
        if done % HELD_OUT_EVERY == 0 or done == steps:
            loss = training.held_out(unseen.split(ROWS))
            tell(model=name, run=run, step=done, part="held-out", loss=f"{loss:.4f}")
    if done == steps:
        loss = training.held_out([x.view(ROWS, tokens).long() for x in whole])
        tell(model=name, run=run, step=done, part="all-held-out", loss=f"{loss:.5f}")


def in_turns(runs: Sequence[list[str]], options: Sequence[str], report: Report) -> None:
    """On each GPU several at a time. A kind's first run compiles what the others wait for."""
    left, one_at_a_time = iter(runs), threading.Lock()
    compiled = dict[str, threading.Event]()

    def follow(one: Child, kind: str) -> None:
        with one_at_a_time:
            begins, done = kind not in compiled, compiled.setdefault(kind, threading.Event())
        while (told := one.next()) is not None:
            if "ready" in told:
                if not begins:
                    done.wait()
                one.say()
            elif told["part"] == "first":
                done.set()
                print(*told.values(), flush=True)
            else:
                with one_at_a_time:
                    report.row("convergence", told)
        if begins:
            done.set()
        if failure := one.failure():
            report.failures.append(f"{one.name}: {failure}")
            print(report.failures[-1][:600], flush=True)
        one.end()

    def of_gpu(number: int) -> None:
        while True:
            with one_at_a_time:
                name, run = next(left, ("", ""))
            if not name or not report.wants(f"{name} {run}"):
                break
            kind = f"{name} {'ours' if run.startswith('ours') else 'fla'}"
            late = ("--seconds", str(report.left()))
            follow(Child(__file__, (name, run, *options, *late), number), kind)

    numbers = [*range(len(gpus()) or 1)] * AT_ONCE
    with ThreadPoolExecutor(len(numbers)) as pool:
        list(pool.map(of_gpu, numbers))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--seeds", type=int, default=3, help="2 or more, of ours and of fla's")
    options.add_argument("--child", nargs=2, help="one run: model, run")
    given = options.parse_args(arguments)
    if given.seeds < 2:
        options.error(f"--seeds: want at least 2, whose gap is compared with, got {given.seeds}")
    report = Report(given)
    steps = 4 if given.small else given.steps
    if given.child:
        child(given.child[0], given.child[1], steps, report)
        return
    shared = ["--steps", str(steps), *["--small"][: given.small]]
    seeds = range(given.seeds)
    # what matters most comes first, should the time end
    pairs = [f"{n} {who} {i}" for i in seeds for n in MODELS for who in ("ours", "fla")]
    moved = [f"{n} moved {i}" for i in seeds[:AGAIN] for n in MODELS]
    runs = [x for x in (*pairs, *moved) if given.only.search(x)]
    in_turns([x.split(" ", 1) for x in runs], shared, report)
    report.end()


if __name__ == "__main__":
    main()
