"""Sizes that change from call to call, as in real programs.

    python bench/varying.py                       every case
    python bench/varying.py --only "packed kda"   training on packed rows
    python bench/varying.py --only prefill        prompts of lengths not seen before
    python bench/varying.py --only decode         a token of one sequence after another
    python bench/varying.py --only host           the host's time of one operator
    python bench/varying.py --only sizes          a thousand calls of random sizes
    python bench/varying.py --only operator       packed operators beside the same as a batch

packed MIXER TOKENS: a training step with AdamW of 12 layers, hidden size 1024, bf16: one row of
documents whose lengths are new in every step (log-normal, means 700 and 300), in tokens/s beside 8
whole rows of as many tokens, a few steps of either in turns, the median of all turns; then the ms
of a step beside the same offsets again, each waited for, the median of all, and the slowest beside
its own repeat. prefill MIXER: 24 layers, one prompt of 60 to 2000 tokens, ms beside a prompt of
1000 tokens again. decode MIXER: 24 layers, ms a token of one sequence without CUDA graphs, beside
the same positions of a second sequence. host OPERATOR: microseconds of a call of a size not seen
before, beside the same size again; both: with backward. sizes MIXER: calls of 2 layers with random
rows and lengths, a training step of a batch, of a packed row, a prompt and 4 tokens after it in
turn, ms of the slowest beside the median. operator OPERATOR: ms on the device of sequences of equal
lengths in one row, beside the same as a batch. compilations: kernel variants asked for
after the first steps (slipstream.runtime.compilations) and those that are compiled in the
background after them; host_us: until a step returns. A case run with SLIPSTREAM_REPLAY=off says so.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from harness import DEVICE, Provider, Report, Row, language_model, parser, synchronize
from torch import Tensor

from slipstream.runtime import call_replay, compilations, compile_ahead
from slipstream.tools.catalog import Shape, chosen

MIXERS = {
    **{x: [x] for x in ("gated_deltanet", "kda", "gla", "mamba2", "rwkv7", "retention")},
    "hybrid": ["gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"],
    "attention": ["attention"],
}
PACKED = {8192: 300, 32768: 700}  # tokens of a step, and of a document on average
OPERATORS = ("chunk_gated_delta_rule", "chunk_kda", "chunk_gla", "chunk_simple_gla", "attention")
BATCHED = (*OPERATORS, "chunk_delta_rule", "chunk_rwkv6", "chunk_rwkv7", "chunk_gsa", "chunk_gdn2")
BATCHES = (8, 1024, 32), (4, 4096, 32), (32, 256, 16), (100, 80, 8)
WARM, STEPS, TURNS, CALLS = 4, 4, 5, 40


def offsets(total: int, mean: int, random: Random) -> Tensor:
    cuts = [0]
    while cuts[-1] < total:
        cuts.append(min(total, cuts[-1] + max(8, int(mean * random.lognormvariate(0, 1)))))
    return torch.tensor(cuts, dtype=torch.int32).to(DEVICE)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds until it returns, and until the device is done."""
    synchronize()
    start = time.perf_counter()
    step()
    returned = time.perf_counter()
    synchronize()
    return returned - start, time.perf_counter() - start


def asked_for() -> int:
    """Kernel variants so far, with those that are compiled ahead."""
    compile_ahead.finish()
    return compilations()


def in_a_row(steps: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Seconds of a step until the host is free, and in all, where none waits for the one before."""

    def run() -> None:
        for step in steps:
            step()

    host, whole = timed(run)
    return host / len(steps), whole / len(steps)


def model_of(mixer: str, layers: int, small: bool) -> Any:
    kinds = MIXERS[mixer]
    mixers = [kinds[i % len(kinds)] for i in range(len(kinds) if small else layers)]
    return language_model(mixers, small, hidden_size=1024, num_heads=8)


def row(name: str, case: str, cells: dict[str, Any], ours: float, beside: float) -> Row:
    """cells: those that do not follow from the two figures."""
    replay = "" if call_replay.ENABLED else ", no replay"
    ratio = ours / beside
    shown = {"ours": round(ours, 3), "same_or_whole": round(beside, 3), "ratio": round(ratio, 3)}
    return {"name": name, "case": case + replay, **cells, **shown}


def packed(mixer: str, total: int, report: Report) -> Iterator[Row]:
    small = report.options.small
    tokens, mean = (64, 12) if small else (total, PACKED[total])
    model = model_of(mixer, 12, small).train()
    fused = DEVICE.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    ids = torch.randint(1, 64 if small else 32000, (1, tokens), device=DEVICE)
    random = Random(0)

    def step(shape: tuple[int, int], **inputs: Tensor) -> None:
        given = ids.view(shape)
        model(input_ids=given, labels=given, use_cache=False, **inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    count, turns = report.runs(STEPS), report.runs(TURNS)
    rows = partial(step, (8, tokens // 8))
    texts = [offsets(tokens, mean, random) for _ in range(WARM + (turns + 3) * count)]
    documents = [partial(step, (1, tokens), cu_seqlens=x) for x in texts]
    in_a_row([rows] * WARM)
    in_a_row(documents[:WARM])
    if report.options.once:
        return
    before, found, whole = asked_for(), [], []
    for i in range(turns):
        found.append(in_a_row(documents[WARM + i * count :][:count]))
        whole.append(in_a_row([rows] * count)[1])
    host, ours = map(statistics.median, zip(*found, strict=True))
    pairs = [(timed(x)[1], timed(x)[1]) for x in documents[WARM + turns * count :]]
    cells = {
        "tokens": tokens,
        "sequences": round(statistics.mean(len(x) - 1 for x in texts)),
        "compilations": compilations() - before,
        "host_us": round(host * 1e6),
    }
    yield row(mixer, "packed, tokens/s", cells, tokens / ours, tokens / statistics.median(whole))
    new, same = (statistics.median(x) * 1e3 for x in zip(*pairs, strict=True))
    yield row(mixer, "packed, ms a step", cells, new, same)
    slowest = max(x for x, _ in pairs) * 1e3
    yield row(mixer, "packed, ms of the slowest step", cells, slowest, same)


@torch.no_grad()
def prefill(mixer: str, report: Report) -> Iterator[Row]:
    small = report.options.small
    model = model_of(mixer, 24, small).eval()
    random, longest = Random(0), 40 if small else 2000

    def prompt(tokens: int) -> Callable[[], object]:
        ids = torch.randint(1, 64 if small else 32000, (1, tokens), device=DEVICE)
        return lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1)

    new = [prompt(random.randint(longest // 33 + 1, longest)) for _ in range(WARM + CALLS)]
    for call in new[:WARM]:
        timed(call)
    if report.options.once:
        return
    before = asked_for()
    found = sorted(timed(call) for call in new[WARM : WARM + report.runs(CALLS)])
    asked = compilations() - before
    same = [timed(x)[1] for x in [prompt(longest // 2)] * report.runs(CALLS)]
    cells = {
        "tokens": longest // 2,
        "sequences": 1,
        "compilations": asked,
        "host_us": round(statistics.median(x[0] for x in found) * 1e6),
    }
    median = statistics.median(x[1] for x in found)
    yield row(mixer, "prefill, ms", cells, median * 1e3, statistics.median(same) * 1e3)


@torch.no_grad()
def decode(mixer: str, report: Report) -> Iterator[Row]:
    small = report.options.small
    model = model_of(mixer, 24, small).eval()
    ids = torch.randint(1, 64 if small else 32000, (1, 12 if small else 500), device=DEVICE)

    def tokens(count: int) -> list[tuple[float, float]]:
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        token = ids[:, :1]
        step = partial(model, input_ids=token, past_key_values=cache, use_cache=True)
        return [timed(step) for _ in range(count)]

    tokens(WARM)
    if report.options.once:
        return
    before, count = asked_for(), report.runs(CALLS)
    found, again = tokens(count), tokens(count)
    cells = {
        "tokens": ids.shape[1],
        "sequences": 1,
        "compilations": compilations() - before,
        "host_us": round(statistics.median(x[0] for x in found) * 1e6),
    }
    new, same = (statistics.median(x[1] for x in times) * 1e3 for times in (found, again))
    yield row(mixer, "decode, ms a token", cells, new, same)


def host(operator: str, report: Report) -> Iterator[Row]:
    sample, random = chosen([operator])[0], Random(0)
    heads = 2 if report.options.small else 4

    def call(tokens: int, trained: bool) -> Callable[[], object]:
        width = 16 if report.options.small else 128
        shape = Shape(B=1, T=tokens, H=heads, K=width, V=width)
        args = sample.inputs(shape, DEVICE)
        leaves = [x.requires_grad_(trained) for x in args.values() if x.is_floating_point()]

        def run() -> None:
            out = sample.call(args)[0]
            if trained:
                torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

        return run

    for trained in (False, True):
        count = report.runs(CALLS)
        sizes = [
            random.randint(20, 60 if report.options.small else 900) for _ in range(WARM + count)
        ]
        new = [call(n, trained) for n in sizes]
        for x in new[:WARM]:
            timed(x)
        if report.options.once:
            continue
        before = asked_for()
        ours = statistics.median(timed(x)[0] for x in new[WARM:])
        asked = compilations() - before
        again = call(sizes[0], trained)
        same = statistics.median(timed(again)[0] for _ in range(2 * count))
        cells = {
            "tokens": round(statistics.mean(sizes)),
            "sequences": 1,
            "compilations": asked,
            "host_us": round(ours * 1e6, 1),
        }
        case = "both, us" if trained else "forward, us"
        yield row(operator, case, cells, ours * 1e6, same * 1e6)


def sizes(mixer: str, report: Report) -> Iterator[Row]:
    small = report.options.small
    model = model_of(mixer, max(2, len(MIXERS[mixer])), small)
    random, longest, vocabulary = Random(0), 40 if small else 4000, 64 if small else 32000

    def ids(rows: int, tokens: int) -> Tensor:
        return torch.randint(1, vocabulary, (rows, tokens), device=DEVICE)

    def trained(given: Tensor, **inputs: Tensor) -> None:
        model.train()
        model(input_ids=given, labels=given, use_cache=False, **inputs).loss.backward()
        model.zero_grad()

    @torch.no_grad()
    def generated(given: Tensor) -> None:
        model.eval()
        cache = model(input_ids=given, use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(4):
            model(input_ids=given[:, :1], past_key_values=cache, use_cache=True)

    def call(i: int) -> Callable[[], object]:
        rows, tokens = random.randint(1, 4), random.randint(longest // 60 + 1, longest)
        if i % 3 == 1:
            texts = offsets(tokens, max(8, tokens // random.randint(1, 20)), random)
            return partial(trained, ids(1, tokens), cu_seqlens=texts)
        return partial((trained, generated)[i % 3 // 2], ids(rows, tokens // rows + 1))

    for i in range(3 * WARM):
        timed(call(i))
    if report.options.once:
        return
    before = asked_for()
    count = 9 if small else 1000
    found = [timed(call(i)) for i in range(count)]
    seconds = [x for _, x in found]
    cells = {
        "tokens": longest,
        "sequences": count,
        "compilations": asked_for() - before,
        "host_us": round(statistics.median(x for x, _ in found) * 1e6),
    }
    yield row(
        mixer, "random sizes, ms", cells, max(seconds) * 1e3, statistics.median(seconds) * 1e3
    )


def batch(operator: str, B: int, T: int, H: int, report: Report) -> Iterator[Row]:
    if report.options.small:
        B, T, H = 3, 20, 2
    sample, width = chosen([operator])[0], 16 if report.options.small else 128
    calls: dict[str, Callable[[], object]] = {}
    for way in ("packed", "batch"):
        shape = Shape(
            B=B, T=T, H=H, K=width, V=width, lengths=(T,) * B if way == "packed" else None
        )
        given = Provider(lambda **x: sample.call(x), sample.inputs(shape, DEVICE))
        calls |= {f"{way}, forward": given.forward, f"{way}, both": given.gradients}
    before, ms, size = asked_for(), report.times(calls), f"{B} x {T} x {H} heads"
    for what in ("forward", "both") if ms else ():
        cells = {"tokens": B * T, "sequences": B, "compilations": asked_for() - before}
        case = f"{size} packed, {what}, ms"
        yield row(operator, case, cells, ms[f"packed, {what}"], ms[f"batch, {what}"])


def main(argv: Sequence[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    cases: list[Any] = [(f"host {x}", "varying", partial(host, x, report)) for x in OPERATORS]
    for total in PACKED:
        cases += [
            (f"packed {x} {total}", "varying", partial(packed, x, total, report)) for x in MIXERS
        ]
    for x in BATCHED:
        for shape in BATCHES:
            cases.append((f"operator {x} {shape}", "varying", partial(batch, x, *shape, report)))
    for what in (prefill, decode, sizes):
        cases += [(f"{what.__name__} {x}", "varying", partial(what, x, report)) for x in MIXERS]
    report.measure(cases)


if __name__ == "__main__":
    main()
