"""How much the lists of neighbouring queries overlap, for trained indexers and for random lists.

    python bench/selected_overlap.py --seconds 190

A small language model learns Python's and torch's sources (BPE of 8,192 tokens, rows of 16,384).
First with dense attention, while the indexers of QSA and MSA learn its attention on all keys; then
three copies go on for the same number of steps: dense, QSA (lists of 4 keys an entry, one for all
heads), MSA (lists of 128 keys an entry, one for each key head), their indexers on what they select.

    qsa   I[t, j] = sum_h relu(q[t, h] . rotated(norm(mean of 4 keys)))
    msa   I[t, g, j] = max over the block's keys s <= t of q[t, g] . k[s]
    loss  KL(attention, mean over the list's heads || softmax(I / sqrt(D))), on the list

perplexity: of held-out text; with "random" the trained model reads random lists, which says what
its lists are worth. union_N: keys in spans of `span` that N adjacent queries' lists touch, over the
keys of one list; mean over the second half of the held-out rows, where every list is full.
"""

import copy
import math
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import DEVICE, Report, parser
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH = 8192, 512, 2, 8, 2, 64
TOKENS, ROWS, TILE, SAMPLED_TILES = 16384, 2, 512, 2
LEARNING_RATE, WARM_UP = 2e-3, 40
QUERIES = (1, 4, 8, 16)


@dataclass(frozen=True)
class Selection:
    """block: keys an entry; topk: entries a list; lists: of one query; heads: of the indexer."""

    name: str
    block: int
    topk: int
    lists: int
    heads: int
    budgets: tuple[int, ...]


QSA = Selection("qsa", 4, 256, 1, 4, (64, 128, 256, 512))
MSA = Selection("msa", 128, 8, KV_HEADS, KV_HEADS, (4, 8, 16))


def corpus(small: bool) -> tuple[Tensor, Tensor]:
    """Tokens to train on, and those of every fiftieth file."""
    library, package = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    if small:  # its first bytes
        text = b"".join(x.read_bytes()[:4096] for x in sorted(library.glob("a*.py")))
        coded = torch.tensor(bytearray(text), dtype=torch.int32, device=DEVICE)
        return coded[TOKENS * 4 :], coded[: TOKENS * 4]
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    files = [x for x in sorted(library.rglob("*.py")) if "site-packages" not in x.parts]
    files += sorted(package.rglob("*.py"))
    texts = [x.read_text(errors="ignore") for x in files]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((texts[i] for i in order[::4]), trainer)
    coded = [torch.tensor(x.ids, dtype=torch.int32) for x in tokenizer.encode_batch(texts)]
    train = torch.cat([coded[x] for i, x in enumerate(order) if i % 50])
    return train.to(DEVICE), torch.cat([coded[x] for x in order[::50]]).to(DEVICE)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [..., T, D]"""
    half = x.shape[-1] // 2
    rates = 1e5 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Indexer(nn.Module):
    def __init__(self, kind: Selection) -> None:
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(HIDDEN, (kind.heads + 1) * WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of one row [T, hidden]: queries [H, T, D] and keys [S, D], of tokens or of blocks."""
        y = self.project(x).unflatten(-1, (-1, WIDTH))
        positions = torch.arange(len(x), device=x.device)
        q = rotate((norm(y[:, :-1]) * self.gain[0]).transpose(0, 1), positions)
        k = y[:, -1]
        if self.kind.name == "qsa":
            k = k.unflatten(0, (-1, self.kind.block)).mean(1)
            positions = positions[:: self.kind.block]
        return q, rotate(norm(k) * self.gain[1], positions)


def visible(kind: Selection, rows: Tensor, tokens: int) -> Tensor:
    """[rows, blocks]: complete blocks for QSA, those that have begun for MSA."""
    starts = torch.arange(tokens // kind.block, device=rows.device) * kind.block
    return starts + (kind.block - 1 if kind.name == "qsa" else 0) <= rows[:, None]


def entry_scores(kind: Selection, q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """[lists, rows, blocks] or, of MSA, [lists, rows, tokens], -inf where nothing is visible."""
    with torch.autocast(q.device.type, enabled=False):  # bf16's scores would be equal too often
        scores = (q[:, rows].float() @ k.float().T) * WIDTH**-0.5
    if kind.name == "qsa":
        seen = visible(kind, rows, len(k) * kind.block)
        return scores.relu().sum(0, keepdim=True).masked_fill(~seen, -math.inf)
    future = torch.arange(len(k), device=k.device) > rows[:, None]
    return scores.masked_fill(future, -math.inf)


def forced(kind: Selection, scores: Tensor, rows: Tensor) -> Tensor:
    """MSA always takes the query's own block."""
    if kind.name == "msa":
        own = (rows // kind.block)[None, :, None].expand(len(scores), -1, 1)
        scores = scores.scatter(-1, own, math.inf)
    return scores


@torch.no_grad()
def members(kind: Selection, q: Tensor, k: Tensor, topk: int, random: bool) -> Tensor:
    """Which blocks each query selects, bool [lists, T, blocks]."""
    tokens, found = q.shape[1], []
    for rows in torch.arange(tokens, device=q.device).split(2048):
        if random:
            scores = torch.rand(kind.lists, len(rows), tokens // kind.block, device=q.device)
            scores = scores.masked_fill(~visible(kind, rows, tokens), -math.inf)
        else:
            scores = entry_scores(kind, q, k, rows)
            if kind.name == "msa":
                scores = scores.unflatten(-1, (-1, kind.block)).amax(-1)
        best = forced(kind, scores, rows).topk(min(topk, scores.shape[-1]), -1)
        member = torch.zeros_like(scores, dtype=torch.bool)
        found.append(member.scatter_(-1, best.indices, best.values > -math.inf))
    return torch.cat(found, 1)


def keys_of(kind: Selection, member: Tensor, rows: Tensor) -> Tensor:
    """[lists, rows, tokens]: keys that the queries `rows` read."""
    keys = member.repeat_interleave(kind.block, -1)
    at = torch.arange(keys.shape[-1], device=rows.device)
    if kind.name == "qsa":  # the query's own block, until it is complete
        keys = keys | (at >= ((rows + 1) // kind.block * kind.block)[:, None])
    return keys & (at <= rows[:, None])


def index_loss(
    kind: Selection, q: Tensor, k: Tensor, main_q: Tensor, main_k: Tensor, member: Tensor | None
) -> Tensor:
    """Of some tiles of one row, drawn anew each time; main_q [H, T, D], main_k [HKV, T, D]."""
    tokens, losses = main_q.shape[1], []
    for tile in torch.randperm(tokens // TILE)[:SAMPLED_TILES].tolist():
        rows = torch.arange(tile * TILE, (tile + 1) * TILE, device=q.device)
        with torch.no_grad():
            seen = torch.arange(tokens, device=q.device) <= rows[:, None]
            seen = seen if member is None else keys_of(kind, member[:, rows], rows)
            grouped = main_q[:, rows].unflatten(0, (KV_HEADS, -1))
            scores = (grouped @ main_k[:, None].mT).float() * WIDTH**-0.5
            seen = seen if seen.dim() == 2 else seen[:, None]
            target = scores.masked_fill(~seen, -math.inf).softmax(-1)
            target = target.mean(1) if kind.name == "msa" else target.mean((0, 1))[None]
            if kind.name == "qsa":
                target = target.unflatten(-1, (-1, kind.block)).sum(-1)
        scores = entry_scores(kind, q, k, rows)
        if member is not None:
            listed = member[:, rows] if kind.name == "qsa" else seen.squeeze(1)
            scores = scores.masked_fill(~listed, -math.inf)
        valid = scores > -math.inf
        target = target * valid
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-20)
        logs = scores.masked_fill(~valid, -1e30).log_softmax(-1)
        losses.append((target * (target.clamp_min(1e-20).log() - logs)).sum(-1).mean())
    return torch.stack(losses).mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.up, self.down = (
            nn.Linear(HIDDEN, 8 * HIDDEN // 3 * 2, bias=False),
            nn.Linear(8 * HIDDEN // 3, HIDDEN, bias=False),
        )
        self.indexers = nn.ModuleDict({x.name: Indexer(x) for x in (QSA, MSA)})

    def forward(
        self, x: Tensor, kinds: tuple[Selection, ...], sparse: bool, random: bool
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden]; kinds: whose indexers learn; sparse: and select, one of them."""
        y = norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (-1, WIDTH)).transpose(1, 2).split(
            [HEADS, KV_HEADS, KV_HEADS], 1
        )  # fmt: skip
        positions = torch.arange(x.shape[1], device=x.device)
        q, k = rotate(norm(q), positions), rotate(norm(k), positions)
        loss, lists = x.new_zeros((), dtype=torch.float32), []
        for kind in kinds:
            for row in range(len(x)):
                iq, ik = self.indexers[kind.name](y[row].detach())
                member = members(kind, iq, ik, kind.topk, random) if sparse else None
                lists.append(member)
                if torch.is_grad_enabled():
                    main = q[row].detach(), k[row].detach()
                    loss = loss + index_loss(kind, iq, ik, *main, member) / len(x)
        if not sparse:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            kind = kinds[0]
            mask = torch.stack([keys_of(kind, m, positions) for m in lists])
            k, v = (z.repeat_interleave(HEADS // KV_HEADS, 1) for z in (k, v))
            folded = [z.reshape(-1, HEADS // kind.lists, *z.shape[2:]) for z in (q, k, v)]
            backend = SDPBackend.EFFICIENT_ATTENTION if x.is_cuda else SDPBackend.MATH
            with sdpa_kernel(backend):
                o = F.scaled_dot_product_attention(*folded, attn_mask=mask.flatten(0, 1)[:, None])
            o = o.reshape(q.shape)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        gate, up = self.up(norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        for name, w in self.named_parameters():
            if w.dim() == 2 and "gain" not in name:
                nn.init.normal_(w, std=0.02)

    def forward(
        self, ids: Tensor, kinds: tuple[Selection, ...] = (), sparse: bool = False,
        random: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Cross entropy of ids [B, T + 1], nats a token, and the indexers' loss."""
        x = norm(self.embedding(ids[:, :-1]))
        total = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, loss = block(x, kinds, sparse, random)
            total = total + loss
        logits = norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten().long()), total


def cast() -> torch.autocast:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def train(
    model: Model, data: Tensor, steps: int, kinds: tuple[Selection, ...], sparse: bool, falls: bool
) -> tuple[float, float]:
    """Mean losses of the last tenth of the steps. falls: the learning rate goes to 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    generator, last = torch.Generator().manual_seed(steps), []
    for step in range(steps):
        share = min(1.0, (step + 1) / WARM_UP) * (1 - step / steps if falls else 1)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * share
        begins = torch.randint(len(data) - TOKENS - 1, (ROWS, 1), generator=generator)
        ids = data[begins.to(DEVICE) + torch.arange(TOKENS + 1, device=DEVICE)]
        with cast():
            loss, index = model(ids, kinds, sparse)
        (loss + index).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps * 9 // 10:
            last.append(torch.stack([loss.detach(), index.detach()]))
    found = torch.stack(last).mean(0).tolist()
    return found[0], found[1]


@torch.no_grad()
def perplexity(model: Model, data: Tensor, kind: Selection | None, random: bool = False) -> float:
    losses = []
    for begin in range(0, min(len(data) - TOKENS, 12 * TOKENS), TOKENS):
        with cast():
            ids = data[None, begin : begin + TOKENS + 1]
            losses.append(model(ids, (kind,) if kind else (), kind is not None, random)[0])
    return math.exp(torch.stack(losses).mean().item())


@torch.no_grad()
def overlaps(model: Model, data: Tensor, kind: Selection, report: Report) -> None:
    """Rows of unions: each layer, trained and random lists, budgets, spans."""
    rows: dict[tuple[object, ...], list[Tensor]] = {}
    for begin in range(0, min(len(data) - TOKENS, 4 * TOKENS), TOKENS):
        x = norm(model.embedding(data[None, begin : begin + TOKENS]))
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            with cast():
                iq, ik = block.indexers[kind.name](norm(x)[0])
                for random in (False, True):
                    for topk in kind.budgets:
                        member = members(kind, iq, ik, topk, random)[:, TOKENS // 2 :]
                        size = member[:, 0].sum(-1).float().mean() * kind.block
                        for span in sorted({kind.block, 16, 64, 128} - set(range(kind.block))):
                            touched = member.unflatten(-1, (-1, span // kind.block)).any(-1)
                            unions = [
                                touched.unflatten(1, (-1, n)).any(2).sum(-1).float().mean() * span
                                for n in QUERIES
                            ]
                            key = (layer, "random" if random else "trained", topk, span)
                            rows.setdefault(key, []).append(torch.stack(unions) / size)
                x = block(x, (kind,), True, False)[0]
    for (layer, lists, topk, span), found in rows.items():
        cells = {
            "kind": kind.name, "lists": lists, "layer": layer, "tokens": TOKENS,
            "block": kind.block, "topk": topk, "span": span,
        }  # fmt: skip
        means = torch.stack(found).mean(0).tolist()
        cells |= {f"union_{n}": round(x, 3) for n, x in zip(QUERIES, means, strict=True)}
        report.row("selected_overlap", cells)


def main(arguments: Sequence[str] | None = None) -> None:
    global TOKENS, TILE, VOCABULARY, HIDDEN, QSA, MSA
    options = parser(__doc__).parse_args(arguments)
    report = Report(options)
    base_steps, steps = 400, 300
    if options.small:
        TOKENS, TILE, VOCABULARY, HIDDEN, base_steps, steps = 256, 64, 256, 48, 3, 2
        QSA = replace(QSA, topk=8, budgets=(4, 8))
        MSA = replace(MSA, block=16, topk=4, budgets=(2, 4))
    data, unseen = corpus(options.small)
    after = time.perf_counter() - report.start
    print(f"{len(data)} tokens, {len(unseen)} held out, after {after:.0f} s", flush=True)
    torch.set_float32_matmul_precision("high")
    base = Model().to(DEVICE)
    branches: dict[str, tuple[Selection, ...]] = {"dense": (), "qsa": (QSA,), "msa": (MSA,)}
    if not options.small:
        probe, spent = copy.deepcopy(base), {}
        for name, kinds in {"base": (QSA, MSA), **branches}.items():
            train(probe, data, 1, kinds, name in ("qsa", "msa"), False)
            torch.cuda.synchronize()
            start = time.perf_counter()
            train(probe, data, 3, kinds, name in ("qsa", "msa"), False)
            torch.cuda.synchronize()
            spent[name] = (time.perf_counter() - start) / 3
        print({x: f"{s:.3f} s a step" for x, s in spent.items()}, flush=True)
        # 45% of the time for the first stage, the rest for the three copies, 25 s to evaluate
        left = min(report.left(), 600) - 25
        base_steps = int(min(base_steps * 2, 0.45 * left / spent.pop("base")))
        steps = int(min(steps * 2, 0.55 * left / sum(spent.values())))
    start = time.perf_counter()
    loss, index = train(base, data, base_steps, (QSA, MSA), False, False)
    spent_s = time.perf_counter() - start
    print(f"dense, {base_steps} steps: {loss:.3f}, index {index:.3f}, {spent_s:.0f} s", flush=True)
    for name, kinds in branches.items():
        model, start = copy.deepcopy(base), time.perf_counter()
        loss, index = train(model, data, steps, kinds, name != "dense", True)
        kind = kinds[0] if kinds else None
        cells = {
            "kind": name, "lists": "trained" if kind else "", "tokens": TOKENS,
            "block": kind.block if kind else "", "topk": kind.topk if kind else "",
            "steps": base_steps + steps, "loss": round(loss, 4), "index_loss": round(index, 4),
        }  # fmt: skip
        report.row(
            "selected_overlap", cells | {"perplexity": round(perplexity(model, unseen, kind), 3)}
        )
        if kind:
            random = {"lists": "random", "loss": "", "index_loss": ""}
            worth = round(perplexity(model, unseen, kind, True), 3)
            report.row("selected_overlap", cells | random | {"perplexity": worth})
            overlaps(model, unseen, kind, report)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
