"""Drafts by a smaller model, for decode.py: two models, trained here for a minute on
the text of Python's standard library, byte by byte."""

import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, Report, Row, first, language_model, synchronize
from torch import Tensor

# width, layers, heads: about 0.1 B parameters, and a fifth of them
TARGET, DRAFT = (1024, 8, 8), (512, 6, 4)
STEPS, ROWS, TOKENS, RATE = 300, 32, 512, 2e-3
SECONDS = 40  # of a model's training at most, and a fifth of --seconds
PROMPTS, PROMPT, NEW_TOKENS = 4, 256, 256
BATCHES = (1, 8, 64)
GUESSES = (2, 4)
LOG2 = 0.6931471805599453


def text() -> Tensor:
    """Bytes of all modules, in an order of their own; the last twentieth is for prompts."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(x for x in folder.glob("*/*.py") if "site-packages" not in x.parts)
    files += sorted(folder.glob("*.py"))
    random.Random(0).shuffle(files)
    data = b"".join(x.read_bytes() for x in files)[: 16 << 20]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def trained(sizes: tuple[int, int, int], data: Tensor, report: Report) -> tuple[Any, float, int]:
    """A model of gated_deltanet after some steps, its loss in bits a byte at the end, and steps."""
    width, layers, heads = sizes
    small = report.options.small
    model = language_model(
        ["gated_deltanet"] * (2 if small else layers),
        small,
        hidden_size=width,
        num_heads=heads,
        vocab_size=256,
    )
    if small:  # its own vocabulary is smaller
        data = data % model.config.vocab_size
    steps, rows, tokens = (3, 2, 64) if small else (STEPS, ROWS, TOKENS)
    master = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(master.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    source = data.to(DEVICE)
    model.train()
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(steps):
        if step % 20 == 1:
            synchronize()
            if step == 1:  # kernels are compiled
                start = time.perf_counter()
            if time.perf_counter() - start > min(SECONDS, report.options.seconds / 5):
                break
        warm = min(1.0, (step + 1) / 40)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (1 - 0.9 * step / steps)
        at = torch.randint(0, len(source) - tokens - 1, (rows, 1), device=DEVICE)
        ids = source[at + torch.arange(tokens + 1, device=DEVICE)].long()
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                master[name].grad = p.grad.float()
            torch.nn.utils.clip_grad_norm_(master.values(), 1.0)
            optimizer.step()
            for name, p in model.named_parameters():
                p.copy_(master[name])
                p.grad = None
        losses.append(loss.detach())
    bits = torch.stack(losses[-20:]).mean().item() / LOG2
    return model.eval(), bits, len(losses)


def generation_rows(model: Any, draft: Any, prompts: list[Tensor], report: Report) -> Iterator[Row]:
    """generate of one sequence, with drafts of the smaller model and without."""
    made = 8 if report.options.small else NEW_TOKENS
    shared: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    shared |= {"max_new_tokens": made}
    counts: list[int | None] = [None, *GUESSES]
    for count in counts[:2] if report.options.small else counts:
        options = dict(shared)
        if count is not None:
            draft.generation_config.num_assistant_tokens = count
            options["assistant_model"] = draft
        seconds, rounds, tokens = 0.0, 0, []
        for i, ids in enumerate([prompts[0], *prompts]):
            given = {**options, "attention_mask": torch.ones_like(ids)}
            before = model.decoding.replays + model.decoding.eager
            out: list[Tensor] = []
            took = first(lambda: out.append(model.generate(ids, **given)))  # noqa: B023
            if i:  # the first one compiles
                seconds += took
                rounds += model.decoding.replays + model.decoding.eager - before
                tokens.append(out[0][0, ids.shape[1] :])
        if count is None:
            plain, speed = tokens, len(prompts) * made / seconds
        equal = sum(int((x == y).sum()) for x, y in zip(tokens, plain, strict=True))
        row = {"what": "generate", "drafts": count or 0, "B": 1}
        row |= {"tokens/s": round(len(prompts) * made / seconds, 1)}
        row |= {"of none": round(len(prompts) * made / seconds / speed, 3)}
        yield row | {
            "tokens a round": round(len(prompts) * (made - 1) / max(rounds, 1), 2),
            "equal": f"{equal} of {len(prompts) * made}",
            "reason": str(model.decoding.reason)[:60],
        }


def step_ms(model: Any, prompts: Tensor, size: int, report: Report) -> float:
    """Milliseconds of a captured step of the model: one token, or `size` drafts to verify."""
    from slipstream.models import StateCache
    from slipstream.models.greedy import Verifier

    B, T = prompts.shape
    cache = StateCache(len(model.model.layers), T + 64)
    with torch.no_grad():
        model(prompts, cache=cache, use_cache=True, logits_to_keep=1)
    decoding, device = model.decoding, prompts.device
    if not decoding.begin(model):
        raise RuntimeError("the model generates elsewhere")
    try:
        ids = prompts[:, :1].expand(B, size).contiguous()
        given: tuple[Tensor, ...] = (ids,)
        drafts = None if size == 1 else Verifier(model, cache, size, device).drafts
        if drafts is not None:
            given = (ids, torch.ones(1, dtype=torch.long, device=device))

        def run(ids: Tensor, accepted: Tensor | None = None) -> Tensor:
            if drafts is None:
                h = model.model.step(ids, cache)
            else:
                drafts.accepted = accepted
                h = model.model.verify(ids, cache, drafts)
            return model.lm_head(h).argmax(-1)

        each = report.runs(20)
        with torch.no_grad():
            for _ in range(3):
                decoding.run(run, cache, given, size, device, required=True)
            synchronize()
            start = time.perf_counter()
            for _ in range(each):
                decoding.run(run, cache, given, size, device, required=True)
            synchronize()
        return (time.perf_counter() - start) / each * 1e3
    finally:
        decoding.end()


def empty(cache: Any) -> None:
    """All tensors are there, with nothing in them."""
    cache.reset()
    for layer in cache.layers:
        layer.is_initialized = True


def rows(report: Report) -> Iterator[Row]:
    data = text()
    cut = len(data) - len(data) // 20
    start = time.perf_counter()
    (draft, bits, steps), (model, of_model, of_model_steps) = (
        trained(x, data[:cut], report) for x in (DRAFT, TARGET)
    )
    row = {"what": "trained", "seconds": round(time.perf_counter() - start, 1)}
    sizes = (sum(p.numel() for p in m.parameters()) / 1e6 for m in (draft, model))
    row |= dict(zip(("draft M", "model M"), (round(x, 1) for x in sizes), strict=True))
    row |= {"draft steps": steps, "model steps": of_model_steps}
    yield row | {"draft bits": round(bits, 3), "model bits": round(of_model, 3)}
    ids = (data[cut:].long() % model.config.vocab_size).to(DEVICE)
    length = 16 if report.options.small else PROMPT
    prompts = [ids[None, i * 4096 : i * 4096 + length] for i in range(PROMPTS)]
    rounds: dict[int, float] = {}
    for found in generation_rows(model, draft, prompts, report):
        rounds[int(str(found["drafts"]))] = float(str(found["tokens a round"]))
        yield found
    # of more sequences generate takes no drafts: from the times of graphs and what one accepts
    at = torch.arange(max(BATCHES))[:, None] * 1024 + torch.arange(length)
    for B in BATCHES[:1] if report.options.small else BATCHES:
        batch = ids[at[:B].to(DEVICE)]
        plain = step_ms(model, batch, 1, report)
        for count in (x for x in rounds if x):
            ms = step_ms(model, batch, count + 1, report)
            guess = step_ms(draft, batch, count + 1, report)
            speed = B * rounds[count] / (ms + count * guess)
            row = {"what": "graphs", "drafts": count, "B": B, "step ms": round(plain, 4)}
            row |= {"verify ms": round(ms, 4), "draft ms": round(guess, 4)}
            yield row | {"tokens/s": round(1e3 * speed, 1), "of none": round(speed / B * plain, 3)}
