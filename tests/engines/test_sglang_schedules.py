"""Random schedules of SGLang on slipstream's kernels: prefixes found, prompts in parts, decoding,
drafts accepted, preemption, padded rows. After each pass every slot of the pool is compared. The
backend, the pool and what copies states to tracked slots are SGLang's own files; which slot is
whose is said here. By hand: SCHEDULE_STEPS=10000."""

import os
import sys
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import sglang
from tests.support import sglang_engine
from tests.support.engines import loaded
from tests.support.serving_calls import HV, Call, H, K, V
from tests.support.sglang_engine import NAMES, RELEASES, built

pytestmark = pytest.mark.slow
STEPS = int(os.environ.get("SCHEDULE_STEPS", "60"))
SLOTS, ROWS, DRAFTS, WORDS, CHUNK = 16, 5, 8, 23, 64


@pytest.fixture(params=RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with sglang_engine.engine_of(request.param) as found:
        yield found


@pytest.fixture
def base() -> SimpleNamespace:
    """The base of SGLang's backends, which copies states, and its pool."""
    with loaded(
        RELEASES[0],
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "sglang.srt.mem_cache.memory_pool",
    ) as (backends, pools):
        return SimpleNamespace(
            track=backends.MambaAttnBackendBase._track_mamba_state_extend, pool=pools.MambaPool
        )


class Request:
    """A text, how much of it is done, and the state there in float64."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.done, self.slot = text, 0, -1
        self.state = torch.zeros(HV, V, K, dtype=torch.float64)


class Schedule:
    def __init__(self, engine: SimpleNamespace, base: SimpleNamespace, kind: str) -> None:
        self.random, self.base, self.is_kda = Random(STEPS), base, kind == "kda"
        gates = HV * (K if self.is_kda else 1)
        self.words = Call.make([WORDS], torch.zeros(1), self.is_kda)
        self.words.a = torch.randn(WORDS, gates)
        self.pool = object.__new__(base.pool)
        self.cache = base.pool.SpeculativeState(
            conv=[torch.zeros(1, SLOTS, 3, 2 * H * K + HV * V)],
            temporal=torch.randn(1, SLOTS, HV, V, K),
            intermediate_ssm=torch.zeros(1, ROWS, DRAFTS, HV, V, K),
            intermediate_conv_window=[torch.zeros(1, ROWS, DRAFTS, 3, 2 * H * K + HV * V)],
        )
        self.pool.mamba_cache, self.pool.replayssm_write_pos = self.cache, None
        self.layer_cache = self.pool.mamba2_layer_cache(0)
        self.engine, self.kind = engine, kind
        self.free, self.taken = list(range(1, SLOTS)), set[int]()
        self.prefixes: dict[tuple[int, ...], tuple[int, Tensor]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.expected: dict[int, Tensor] = {}  # of each slot in use
        self.seen: dict[str, int] = {}

    def count(self, what: str, n: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + n

    # texts share beginnings
    def new(self) -> Request:
        length = self.random.randrange(1, 240)
        source = Random(self.random.randrange(2))
        text = [source.randrange(WORDS) for _ in range(length)]
        own = length if self.random.random() < 0.6 else self.random.randrange(length + 1)
        return Request(text[:own] + [self.random.randrange(WORDS) for _ in text[own:]])

    def advance(self, state: Tensor, words: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and states after each word."""
        at = torch.tensor(words, dtype=torch.long)
        w = self.words
        rate = w.A_log.double().exp()
        a = w.a[at].double() + w.dt_bias.double()
        g = -(rate.repeat_interleave(K) if self.is_kda else rate) * F.softplus(a)
        decay = (g.view(-1, HV, 1, K) if self.is_kda else g.view(-1, HV, 1, 1)).exp()
        q, k = (F.normalize(x[0][at].double(), dim=-1, eps=1e-6) for x in (w.q, w.k))
        q, v, b = q * K**-0.5, w.v[0][at].double(), w.b[at].double().sigmoid()
        outputs, states = [], []
        for t in range(len(words)):
            state = state * decay[t]
            x = b[t][:, None] * (v[t] - (state @ k[t].expand(HV, K)[..., None])[..., 0])
            state = state + x[..., None] * k[t][:, None]
            outputs.append((state @ q[t].expand(HV, K)[..., None])[..., 0])
            states.append(state)
        return outputs, states

    def call(self, lengths: list[int], words: list[int], slots: list[int]) -> Call:
        at, w = torch.tensor(words, dtype=torch.long), self.words
        return Call(
            q=w.q[:, at], k=w.k[:, at], v=w.v[:, at], a=w.a[at], b=w.b[at], A_log=w.A_log,
            dt_bias=w.dt_bias, states=self.layer_cache.temporal,
            slots=torch.tensor(slots, dtype=torch.int32),
            offsets=torch.tensor([0, *lengths]).cumsum(0).int(), is_kda=self.is_kda,
            buffer=self.layer_cache.intermediate_ssm,
        )  # fmt: skip

    def forward(self, method: str, call: Call, verify: bool = False, **metadata: Any) -> Tensor:
        backend = built(self.engine, call, getattr(sglang, NAMES[self.kind]), **metadata)
        backend.verify_intermediate_state_indices = torch.arange(ROWS)
        backend._use_strided_target_verify_qkv = True
        backend._track_mamba_state_extend = lambda *given, **more: self.base.track(
            backend, *given, **more
        )
        cache = backend.req_to_token_pool.mamba2_layer_cache(0)
        windows = self.layer_cache.conv[0]
        # contiguous, else SGLang copies the states of padded rows as well
        cache.conv = [windows if self.is_kda else windows.mT.contiguous()]
        a, b = call.a, call.b
        if self.is_kda and method == "forward_extend" and not verify:
            a, b = a[None], b[None]
            if self.engine.release == RELEASES[1]:  # the model has made beta
                a, b = a.unflatten(-1, (HV, K)), b.sigmoid()
        mode = sglang_engine.batch(call, is_target_verify=verify)
        mode.spec_info.draft_token_num, mode.batch_size = DRAFTS, len(call.slots)
        mode.req_pool_indices = torch.arange(len(call.slots))
        layer = sglang_engine.layer(call, None)
        o = getattr(backend, method)(layer, mode, sglang_engine.mixed(call), a, b)
        return o.reshape(-1, HV, V)

    def extend(self) -> None:
        """Prompts, whole or in parts, from a prefix if there is one; states at prefixes' ends."""
        room = max(0, len(self.free) - 3)
        chosen = [x for x in self.running if x.done < len(x.text)]
        chosen = self.random.sample(chosen, min(len(chosen), 2)) + self.waiting[:room]
        chosen = chosen[: self.random.randrange(1, 4)]
        words, lengths, targets, chunks = [], [], [], []
        for x in chosen:
            if x.slot < 0:
                self.waiting.remove(x)
                self.admit(x)
            part = x.text[x.done : x.done + self.random.choice((1, 30, 64, 100, 150))]
            words += part
            lengths.append(len(part))
            kept = len(part) // CHUNK * CHUNK if x.done % CHUNK == 0 and len(self.free) > 3 else 0
            targets.append(self.take() if kept else -1)
            chunks.append(kept // CHUNK if kept and kept < len(part) else -1)
        if not chosen:
            return
        if self.random.random() < 0.3:  # a padded row
            lengths, targets, chunks = [*lengths, 0], [*targets, -1], [*chunks, -1]
        slots = [*(x.slot for x in chosen), *[self.no_slot()] * (len(lengths) - len(chosen))]
        kept_rows = [n for n, c in enumerate(chunks) if c >= 0]
        whole_rows = [n for n, t in enumerate(targets) if t >= 0 and n not in kept_rows]
        at, counts = torch.tensor, [-(-x // CHUNK) for x in lengths]
        metadata = {
            "has_mamba_track_mask": any(t >= 0 for t in targets),
            "track_ssm_h_src": at([sum(counts[:n]) + chunks[n] for n in kept_rows]).long(),
            "track_ssm_h_batch_src": at(kept_rows, dtype=torch.long),
            "track_ssm_h_dst": at([targets[n] for n in kept_rows], dtype=torch.long),
            "track_ssm_final_src": at([slots[n] for n in whole_rows], dtype=torch.long),
            "track_ssm_final_dst": at([targets[n] for n in whole_rows], dtype=torch.long),
            "track_ssm_recompute_dst": None,
            "track_chunk_idx": at(chunks, dtype=torch.int32),
            "conv_states_mask_indices": at([0]),
            "track_conv_indices": torch.zeros(1, 3, dtype=torch.long),
        }
        got = self.forward("forward_extend", self.call(lengths, words, slots), **metadata)
        first = 0
        for n, x in enumerate(chosen):
            part = x.text[x.done : x.done + lengths[n]]
            outputs, states = self.advance(x.state, part)
            self.near(got[first : first + len(part)], outputs)
            first, before = first + len(part), x.done
            x.state, x.done = states[-1], x.done + len(part)
            self.expected[x.slot] = x.state
            if targets[n] >= 0:
                kept = chunks[n] * CHUNK if chunks[n] >= 0 else len(part)
                key = tuple(x.text[: before + kept])
                self.expected[targets[n]] = states[kept - 1]
                if key in self.prefixes:
                    self.release(self.prefixes.pop(key)[0])
                self.prefixes[key] = targets[n], states[kept - 1]
                self.count("tracked")
        self.count("prompts", len(chosen))

    def admit(self, x: Request) -> None:
        """A slot, with the longest prefix's state or zeros."""
        x.slot = self.take()
        at = torch.tensor([x.slot])
        found = [p for p in self.prefixes if len(p) < len(x.text) and x.text[: len(p)] == list(p)]
        if found:
            best = max(found, key=len)
            slot, state = self.prefixes[best]
            self.pool.copy_from(torch.tensor([slot]), at)
            x.done, x.state = len(best), state
            self.count("prefixes")
        else:
            self.pool.clear_slots(at)
            x.done, x.state = 0, torch.zeros(HV, V, K, dtype=torch.float64)
        self.expected[x.slot] = x.state
        self.running.append(x)

    def generating(self) -> list[Request]:
        ready = [x for x in self.running if x.done == len(x.text)]
        return self.random.sample(ready, min(len(ready), self.random.randrange(1, ROWS)))

    def decode(self) -> None:
        """A token each, with padded rows anywhere."""
        chosen: list[Request | None] = [*self.generating()]
        if not chosen:
            return
        chosen += [None] * self.random.randrange(3)
        self.random.shuffle(chosen)
        words = [self.random.randrange(WORDS) for _ in chosen]
        slots = [x.slot if x else self.no_slot() for x in chosen]
        got = self.forward("forward_decode", self.call([1] * len(words), words, slots))
        for n, x in enumerate(chosen):
            if x:
                outputs, states = self.advance(x.state, words[n : n + 1])
                self.near(got[n : n + 1], outputs)
                x.state, x.done = states[0], x.done + 1
                x.text.append(words[n])
                self.expected[x.slot] = x.state
        self.count("tokens", len(words))

    def verify(self) -> None:
        """Drafts of each, of which from none to seven are right; the last one is committed."""
        chosen: list[Request | None] = [*self.generating()]
        if not chosen:
            return
        chosen += [None] * (self.random.randrange(2) if len(chosen) < ROWS - 1 else 0)
        words = [self.random.randrange(WORDS) for _ in range(DRAFTS * len(chosen))]
        slots = [x.slot if x else self.no_slot() for x in chosen]
        call = self.call([DRAFTS] * len(chosen), words, slots)
        got = self.forward("forward_extend", call, verify=True)
        self.check()  # no slot has moved on
        for n, x in enumerate(chosen):
            if x:
                mine = words[n * DRAFTS : (n + 1) * DRAFTS]
                outputs, states = self.advance(x.state, mine)
                self.near(got[n * DRAFTS : (n + 1) * DRAFTS], outputs)
                accepted = self.random.randrange(DRAFTS)
                row = self.layer_cache.intermediate_ssm[n, accepted]
                self.layer_cache.temporal[x.slot] = row
                x.state, x.done = states[accepted], x.done + accepted + 1
                x.text += mine[: accepted + 1]
                self.expected[x.slot] = x.state
                self.count(f"accepted {accepted}")

    def preempt(self) -> None:
        """Takes a request's slot away; it begins again later, or never."""
        if self.running:
            x = self.running.pop(self.random.randrange(len(self.running)))
            self.release(x.slot)
            x.slot = -1
            if self.random.random() < 0.5 and len(x.text) < 260:
                self.waiting.insert(0, x)
                self.count("preempted")
        if self.prefixes and len(self.free) < 5:
            self.release(self.prefixes.pop(self.random.choice(list(self.prefixes)))[0])

    def no_slot(self) -> int:
        """Of a padded row: none, or the one that SGLang keeps for these."""
        return self.random.choice((-1, 0))

    def take(self) -> int:
        self.taken.add(self.free[-1])
        return self.free.pop()

    def release(self, slot: int) -> None:
        del self.expected[slot]
        self.free.append(slot)

    def near(self, got: Tensor, want: list[Tensor]) -> None:
        torch.testing.assert_close(got.double(), torch.stack(want), atol=1e-4, rtol=1e-3)

    def check(self) -> None:
        for slot, state in self.expected.items():
            found = self.layer_cache.temporal[slot].double()
            assert torch.allclose(found, state, atol=1e-4, rtol=1e-3), f"slot {slot}"

    def step(self) -> None:
        if len(self.waiting) < 4:
            self.waiting.append(self.new())
        unused = [*self.free]
        self.taken.clear()
        ways = (self.extend, self.extend, self.decode, self.verify, self.verify, self.preempt)
        before = self.layer_cache.temporal.clone()
        self.random.choice(ways)()
        self.check()
        untouched = [x for x in unused if x not in self.taken]
        assert torch.equal(self.layer_cache.temporal[untouched], before[untouched])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_no_slot_is_wrong_after_random_steps(
    base: SimpleNamespace, engine: SimpleNamespace, kind: str
) -> None:
    schedule = Schedule(engine, base, kind)
    for _ in range(STEPS):
        schedule.step()
    met = schedule.seen
    print(kind, engine.release, dict(sorted(met.items())), file=sys.stderr)
    wanted = {"tracked", "prompts", "tokens", "prefixes", "preempted"}
    assert wanted <= met.keys() and sum(x.startswith("accepted") for x in met) >= 5, met
