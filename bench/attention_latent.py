"""Decoding from a cache of latents (MLA, absorbed): right, then its share of the bandwidth.

python bench/attention_latent.py check
python bench/attention_latent.py time
"""

import functools
import sys
from typing import Any

import torch
from attention_gpu import COPY_BYTES_PER_MS, bench, error
from record import record
from torch import Tensor

from slipstream.kernels.attention.triton import decode_latent_launch as launch

R, P = 512, 64
# B, S, H, page size or 0
CACHES = [
    (32, 8192, 128, 0),
    (64, 8192, 16, 0),
    (128, 4096, 16, 64),
    (1, 131072, 128, 0),
]


def case(B: int, T: int, S: int, H: int, page: int) -> tuple[Tensor, Tensor, Tensor | None]:
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pages = B * -(-S // page) if page else 0
    table = torch.randperm(pages, device="cuda").int().view(B, -1) if page else None
    latent = torch.randn(*((pages, page) if page else (B, S)), R + P, **make)
    return torch.randn(B, T, H, R + P, **make), latent, table


def oracle(
    q: Tensor, latent: Tensor, lengths: Tensor, table: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if table is not None:
        latent = latent[table.long()].flatten(1, 2)
    x = torch.einsum("bthd,bsd->bhts", q.double(), latent.double()) * scale
    T, S = x.shape[-2:]
    own = lengths[:, None] - T + torch.arange(T, device=q.device)
    later = torch.arange(S, device=q.device) > own[..., None]
    x = x.masked_fill(later[:, None], -torch.inf)
    lse = x.logsumexp(-1)
    p = torch.where(lse[..., None].isfinite(), (x - lse[..., None]).exp(), 0.0)
    return torch.einsum("bhts,bsr->bthr", p, latent[..., :R].double()), lse


def check() -> None:
    torch.manual_seed(0)
    for B, T, S, H, page in [
        (3, 1, 900, 128, 0),
        (3, 3, 900, 20, 64),
        (2, 1, 300, 16, 30),
        (1, 1, 9000, 7, 0),
    ]:
        q, latent, table = case(B, T, S, H, page)
        lengths = torch.tensor([S, 1, 333][:B], device="cuda", dtype=torch.int32)
        want = oracle(q, latent, lengths, table, 0.05)
        found = launch.decode(q, latent, lengths, table, R, 0.05)
        same = all(
            torch.equal(x, y)
            for x, y in zip(found, launch.decode(q, latent, lengths, table, R, 0.05))
        )
        off = [error(x, y) for x, y in zip(found, want)]
        word = "ok" if same and max(off) < 5e-3 else "WRONG"
        print(f"latent {B},{T},{S},{H},{page}: {off[0]:.1e} {off[1]:.1e} {word}", flush=True)


def times() -> None:
    rows = []
    for B, S, H, page in CACHES:
        q, latent, table = case(B, 1, S, H, page)
        lengths = torch.full((B,), S, device="cuda", dtype=torch.int32)
        given = (q, latent, lengths, table, R, 0.05)
        ms = bench(functools.partial(launch.decode, *given))
        size, flops = B * S * (R + P) * 2, 2 * B * S * H * (2 * R + P)
        row: dict[str, object] = {"shape": f"{B},{S},{H}", "page": page, "ms": round(ms, 4)}
        row |= {"TB/s": round(size / ms / 1e9, 2), "TFLOP/s": round(flops / ms / 1e9)}
        rows.append({**row, "of copy": round(size / ms / COPY_BYTES_PER_MS, 2)})
        print("latent", " ".join(f"{n} {x}" for n, x in rows[-1].items()), flush=True)
    record("attention_latent", rows)


if __name__ == "__main__":
    check() if sys.argv[1] == "check" else times()
