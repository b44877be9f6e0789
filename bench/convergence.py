"""Losses of our models beside fla's, from the same initialisation on the same data.

    python bench/convergence.py                        gated_deltanet, then kda
    python bench/convergence.py --only kda --steps 500

Models of 0.1 B (12 layers, hidden size 768, 6 heads of 128), the bytes of Python's own library, 8
rows of 512, AdamW on float32 weights under bf16 autocast. fla's model is made by its own class and
trained by its own kernels; ours begins with its weights, by slipstream.models.convert. A second
model of fla's begins with another seed. All three take turns step by step, so that they have come
equally far when the time is over.

ours, fla, other_seed: means over the last 50 steps, nats a byte; held-out ones at the end. The gap
of ours to fla should be no larger than that of the other seed.
"""

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import DEVICE, Report, parser
from torch import Tensor

from slipstream.models import SlipstreamForCausalLM
from slipstream.models.convert import convert

MODELS = {"gated_deltanet": "GatedDeltaNet", "kda": "KDA"}
ROWS, TOKENS, EVERY, HELD_OUT_ROWS = 8, 512, 50, 64
LEARNING_RATE, WARM_UP = 6e-4, 100
SIZES: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_heads": 6, "head_dim": 128, "expand_v": 1,
    "intermediate_size": 2048, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16}
SMALL |= {"intermediate_size": 48}


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


def of_fla(name: str, seed: int, small: bool) -> Any:
    import fla.models

    torch.manual_seed(seed)
    config = getattr(fla.models, f"{MODELS[name]}Config")(**SIZES | (SMALL if small else {}))
    return getattr(fla.models, f"{MODELS[name]}ForCausalLM")(config)


class Run:
    """A model in training, and its losses so far."""

    def __init__(self, model: Any, steps: int) -> None:
        self.model = model.to(DEVICE).train()
        self.losses: list[Tensor] = []
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            LEARNING_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        warm = min(WARM_UP, steps)
        self.rate = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda i: min((i + 1) / warm, 1 - 0.9 * i / steps)
        )

    def step(self, ids: Tensor) -> None:
        loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.rate.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def loss(self, ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return self.model(ids, labels=ids, use_cache=False).loss

    def recent(self) -> float:
        return torch.stack(self.losses[-EVERY:]).mean().item()

    def held_out(self, ids: Tensor) -> float:
        with torch.no_grad():
            return torch.stack([self.loss(x) for x in ids.split(ROWS)]).mean().item()


def compare(name: str, steps: int, report: Report) -> None:
    small = report.options.small
    tokens = 64 if small else TOKENS
    train, held = text(small)
    begun = of_fla(name, 0, small)
    with tempfile.TemporaryDirectory() as folder:
        begun.save_pretrained(f"{folder}/fla")
        convert(f"{folder}/fla", f"{folder}/ours")
        ours = SlipstreamForCausalLM.from_pretrained(f"{folder}/ours")
    runs = {"ours": ours, "fla": begun, "other_seed": of_fla(name, 1, small)}
    runs = {who: Run(model, steps) for who, model in runs.items()}
    every = min(EVERY, steps)
    done = 0
    while done < steps and (done == 0 or report.wants(name)):
        for _ in range(every):
            ids = rows(train, ROWS, tokens, done)
            for who, run in runs.items():
                run.step(ids)
                if done == 0:  # compiles and tunes kernels, fla's for a minute or more
                    print(f"{name}: first step of {who}, {run.recent():.4f}", flush=True)
            done += 1
        losses = {who: f"{run.recent():.4f}" for who, run in runs.items()}
        report.row("convergence", {"model": name, "step": done, "part": "train", **losses})
    ids = rows(held, ROWS if small else HELD_OUT_ROWS, tokens, 0)
    losses = {who: run.held_out(ids) for who, run in runs.items()}
    cells = {who: f"{loss:.4f}" for who, loss in losses.items()}
    report.row("convergence", {"model": name, "step": done, "part": "held-out", **cells})
    gap, between = (abs(losses[who] - losses["fla"]) for who in ("ours", "other_seed"))
    print(f"{name}: {gap:.4f} between ours and fla, {between:.4f} between fla's two seeds")


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=1000)
    report = Report(options.parse_args(arguments))
    steps = 4 if report.options.small else report.options.steps
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    limit = report.options.seconds
    wanted = [name for name in MODELS if report.options.only.search(name)]
    for i, name in enumerate(wanted):
        report.options.seconds = limit * (i + 1) / len(wanted)
        compare(name, steps, report)


if __name__ == "__main__":
    main()
