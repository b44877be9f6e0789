"""A decoding step as a CUDA graph: captured once for each batch size, replayed for every token.

It holds everything between the token ids and the logits, on the tensors of a StateCache. What
generate does with logits (processors, sampling, EOS) is outside of it. Its first step runs as it is
written, which compiles kernels and allocates workspaces; the second is captured. On a CPU there are
no graphs.

The pass of a short prompt takes the host longer than the device. It has a graph for each shape of
prompts without padding: the first pass of a shape runs as it is written, the second is
captured, later ones are replayed. Of more shapes than a cache has graphs for, the one that was not
wanted for longest loses its graph, and gets no other: in turns each pass would be captured.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from slipstream.models.cache import StateCache
from slipstream.models.consistent import logits_of
from slipstream.nn.consistent import has_consistent_product
from slipstream.runtime.token_ids import launched, raise_pending

# caches that a model keeps for its next generate, each of another number of rows
MAX_CACHES = 4
MULTIPLE = 256  # of their max_length
# tokens of a batch up to which a prompt's pass is captured; graphs of them that a cache keeps
MAX_PROMPT_TOKENS, MAX_PROMPTS = 1024, 4
PROMPT = "prompt"


class CudaGraph:
    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs once, and returns the tensor that replays write their result into."""
        # thread_local: what other threads do meanwhile, such as a data loader, is no error
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            result = run()
        self.graph.replay()
        return result

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class Step:
    """One captured step: copies its inputs into the graph's own, and replays it."""

    graph: CudaGraph
    inputs: tuple[Tensor, ...]
    logits: Tensor

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for own, x in zip(self.inputs, inputs):
            own.copy_(x)
        self.graph.replay()
        return self.logits


@dataclass
class Decoding:
    """Counts how a model's generate ran its decoding steps, and turns graphs off: `model.decoding`.

    Attributes:
        captures: CUDA graphs that were made.
        replays: steps that were a replay, the one at a capture included.
        eager: steps that ran without a graph: the first of each graph, and all where there is none.
            Passes of prompts count as none of these.
        reason: why the last generate used no graph, or None.
        enabled: set it to False to run all steps without a graph.

    The caches of up to 4 batch sizes, with their graphs, are kept for the next generate; free()
    gives their memory back. A cache that generate returns, or got, is the caller's.
    """

    captures: int = 0
    replays: int = 0
    eager: int = 0
    reason: str | None = None
    enabled: bool = True
    active: bool = field(default=False, repr=False)
    caches: dict[int, StateCache] = field(default_factory=dict, repr=False)
    _lent: tuple[int, StateCache] | None = field(default=None, repr=False)
    # held by the generate that uses graphs: one at a time, of one thread
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)
    _thread: int | None = field(default=None, init=False, repr=False)
    # of the generate that runs
    assistant: Any = field(default=None, init=False, repr=False)
    drafts_failure: str | None = field(default=None, init=False, repr=False)
    _failure: str | None = field(default=None, repr=False)
    # what has been said once: a reason for generate, a failed capture of a prompt's pass
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Decoding":
        return Decoding(enabled=self.enabled)  # a graph has no copy

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, ()

    def free(self) -> None:
        """Drops the kept caches and graphs."""
        self.caches.clear()

    def begin(self, model: nn.Module) -> bool:
        """Called by generate before its first step; False if another one uses the graphs."""
        if not self._lock.acquire(blocking=False):
            return False
        self._thread = threading.get_ident()
        self.reason = self._failure or why_not(model)
        self.active = self.enabled and self.reason is None
        return True

    def end(self) -> None:
        """Ends a generate; its cache is kept for the next one."""
        self.active, self._thread, self.assistant = False, None, None
        if self._lent is not None:
            rows, cache = self._lent
            self._lent = None
            self.caches[rows] = cache
            while len(self.caches) > MAX_CACHES:
                del self.caches[next(iter(self.caches))]
        self._lock.release()

    @property
    def here(self) -> bool:
        """Whether the generate that runs in this thread uses graphs."""
        return self.active and self._thread == threading.get_ident()

    @property
    def can_lend(self) -> bool:
        """Whether `lend` may be called: not by a generate that a streamer calls within another."""
        return self.here and self._lent is None

    @staticmethod
    def claim(model: nn.Module, cache: StateCache) -> None:
        """Drops the graphs of a cache that are not of the model as it is."""
        now = fingerprint(model)
        if cache.made_for != now:
            cache.graphs.clear()
            cache.drop_blocks()
            cache.drafts, cache.made_for = None, now

    def lend(
        self, model: nn.Module, rows: int, max_length: int, key_dtype: torch.dtype | None = None
    ) -> StateCache:
        """An empty cache, the one of the last generate with as many rows if it is large enough."""
        cache = self.caches.pop(rows, None)
        if cache is not None and _of_inference(cache) and not torch.is_inference_mode_enabled():
            cache = None  # such tensors may be written in that mode alone
        small = cache is not None and (cache.max_length or 0) < max_length
        if cache is None or small or cache.key_dtype != key_dtype:
            layers = len(model.model.layers)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
            cache = StateCache(layers, -(-max_length // MULTIPLE) * MULTIPLE, key_dtype)
        self.claim(model, cache)
        cache.reset()
        self._lent = rows, cache
        return cache

    def refuse(self, why: str, device: torch.device) -> None:
        """The generate that runs shall use no graphs; says so once where that costs most."""
        if self.here:
            self.active, self.reason = False, why
            if device.type == "cuda":
                self._warn()

    def fail_drafts(self, error: Exception) -> None:
        """Graphs that verify drafts failed, and are not tried again unless memory was short; says
        so once. The cache, whose states may be anything, is dropped."""
        why = f"drafts could not be verified: {type(error).__name__}: {error}"
        self.active, self.reason, self._lent = False, why, None
        self.drafts_failure = None if of_memory(error) else why
        self._warn("drafts")

    def lends(self, cache: StateCache) -> bool:
        """Whether a cache is the one of the generate that runs, and graphs are used."""
        return self.active and self._lent is not None and self._lent[1] is cache

    def run(
        self,
        step: Callable[..., Tensor],
        cache: StateCache,
        inputs: tuple[Tensor, ...],
        room: int,
        device: torch.device,
        *,
        required: bool = False,
    ) -> Tensor:
        """step(*inputs), by the cache's graph for inputs like these and that room.

        required: an error of the capture is raised; otherwise steps run without a graph after it.
        """
        key = (room, *((x.shape, x.dtype) for x in inputs))
        if not self.active or key not in cache.graphs:
            self.eager += 1
            result = step(*inputs)
            if self.active:
                cache.graphs[key] = None  # the next one is captured
            return result
        made = cache.graphs[key]
        if made is None:
            try:
                made = cache.graphs[key] = self._captured(step, inputs, device)
            except Exception as e:  # of any kind: without a graph the step still runs
                if required:
                    raise
                self._give_up(e)
                self.eager += 1
                return step(*inputs)
            self.captures += 1
            self.replays += 1
            return made.logits
        self.replays += 1
        return made.run(inputs)

    def takes_prompt(self, cache: Any, input_ids: Tensor) -> bool:
        """Whether the pass of a prompt may be a graph: of a short one, whose time is the host's."""
        return (
            0 < input_ids.numel() <= MAX_PROMPT_TOKENS
            and isinstance(cache, StateCache)
            and self.lends(cache)
            and cache.get_seq_length() == 0
            and not cache.records
            and cache.key_dtype is None
        )

    def prompt(
        self,
        model: Any,
        cache: StateCache,
        input_ids: Tensor,
        positions: Tensor | None,
        prefill: Callable[[], Tensor],
    ) -> Tensor:
        """Logits [N, V] after prompts without padding, which an empty cache has then. The first of
        a shape is `prefill`, the second is captured.

        Raises:
            ValueError: an id of an earlier call was outside the vocabulary, as operators do.
        """
        raise_pending()  # which no replay asks for
        inputs = (input_ids,) if positions is None else (input_ids, positions)
        key = (PROMPT, *((x.shape, x.dtype) for x in inputs))
        made = cache.graphs.get(key, key)
        if made is key or made is False:
            logits = prefill()
            cache.graphs.setdefault(key, None)
            return logits
        if made is None:
            try:
                step = partial(_prompt_step, model, cache)
                made = self._captured(step, inputs, input_ids.device)
            except Exception as e:  # of any kind: a pass without a graph is as right
                cache.reset()
                if of_memory(e):
                    del cache.graphs[key]  # others may have given theirs back by the next time
                else:
                    cache.graphs[key] = False
                sizes = " x ".join(map(str, input_ids.shape))
                why = f"its capture failed: {type(e).__name__}: {e}"
                self._say(PROMPT, f"a prompt of {sizes} tokens runs without a graph, since {why}")
                return prefill()
            made_before = [k for k, x in cache.graphs.items() if k[0] == PROMPT and x]
            for old in made_before[: len(made_before) + 1 - MAX_PROMPTS]:
                cache.graphs[old] = False
            cache.graphs[key] = made
            logits = made.logits
        else:
            cache.graphs[key] = cache.graphs.pop(key)  # the last to go
            for layer in cache.layers:
                layer.is_initialized = True
            logits = made.run(inputs)
        launched()
        cache.step_on(input_ids.shape[1])
        return logits

    @staticmethod
    def _captured(
        step: Callable[..., Tensor], inputs: tuple[Tensor, ...], device: torch.device
    ) -> Step:
        own = tuple(x.clone() for x in inputs)
        graph = graph_on(device)
        assert graph is not None
        return Step(graph, own, graph.capture(lambda: step(*own)))

    def _give_up(self, error: Exception) -> None:
        self.active = False
        self.reason = f"a step could not be captured: {error}"
        # where memory was short, another may be
        if not of_memory(error):
            self._failure = self.reason
        self._warn()

    def _warn(self, what: str = "generate") -> None:
        self._say(what, f"generate runs without graphs, since {self.reason}")

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def of_memory(error: BaseException | None) -> bool:
    """Whether there was too little memory, perhaps for what raised an error of its own later."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _of_inference(cache: StateCache) -> bool:
    """Whether tensors of the cache were made in inference mode."""
    states = (x for layer in cache.layers for x in (getattr(layer, "state", None) or {}).values())
    greedy = cache.greedy
    if cache._blocks is not None and cache._blocks.h.is_inference():
        return True
    return any(x.is_inference() for x in states) or (
        greedy is not None and greedy.ids.is_inference()
    )


def graph_on(device: torch.device) -> CudaGraph | None:
    """A new graph, on devices that have graphs."""
    return CudaGraph() if device.type == "cuda" else None


def _prompt_step(
    model: Any, cache: StateCache, input_ids: Tensor, positions: Tensor | None = None
) -> Tensor:
    """The pass of prompts without padding, as the model's forward has it."""
    base = model.model
    h = base._embed(input_ids, None)
    h, _ = base._continue(h, None, cache, False, positions, input_ids.shape[1])
    return logits_of(model, h[:, -1:])[:, -1]


def decoding_step(model: Any, cache: StateCache) -> tuple[Callable[..., Tensor], int]:
    """A function from ids and, if given, positions [N, 1] to logits [N, 1, V], a row for each row
    of the cache; and the number of its graph, `room` of Decoding.run."""
    if not cache.has_open_rows:
        return lambda ids, at=None: logits_of(model, model.model.step(ids, cache, at)), sys.maxsize
    room = max((cache.max_length or 0) - cache.get_seq_length(), 1)
    blocks = cache.blocks_for(model.model, room)
    ends = blocks.closes()

    def step(ids: Tensor, at: Tensor | None = None) -> Tensor:
        return logits_of(model, blocks.step(model.model, ids, at, ends))

    return step, int(ends)


def _named_modules(
    module: nn.Module, name: str = "", found: dict[nn.Module, str] | None = None
) -> dict[nn.Module, str]:
    """Lists modules as torch's does, in its order. Every generate asks several times, and torch's
    walk, a generator within another for each level, takes three times as long."""
    found = {} if found is None else found
    found[module] = name
    for key, child in module._modules.items():
        if child is not None and child not in found:
            _named_modules(child, f"{name}.{key}" if name else key, found)
    return found


def why_not(model: nn.Module) -> str | None:
    """Why no step of the model can be a graph, or None."""
    consistent = getattr(getattr(model, "config", None), "consistent", False)
    modules = _named_modules(model)
    parameters = (p for module in modules for p in module._parameters.values())
    devices = {p.device for p in parameters if p is not None}
    if len(devices) != 1:
        return f"its parameters are on {len(devices)} devices"
    if graph_on(next(iter(devices))) is None:
        return f"there are no graphs on {next(iter(devices)).type}"
    if _has_any_global_hook():
        return "there is a hook of all modules, which may do what a graph does not repeat"
    for module, name in modules.items():
        own = "forward" in module.__dict__ and not (consistent and has_consistent_product(module))
        if module._forward_hooks or module._forward_pre_hooks or own:
            return f"{name or 'the model'} has a hook, which may do what a graph does not repeat"
    return None


def own_modules(model: nn.Module) -> bool:
    """Whether there are none but slipstream's and torch's: an adapter may be switched off."""
    known = ("slipstream.", "torch.nn.")
    return all(type(module).__module__.startswith(known) for module in _named_modules(model))


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """A key of all that a graph has read from the model: the addresses of its parameters, its
    modules, and torch's settings of precision."""
    modules = _named_modules(model)
    named = (x for module in modules for x in (module._parameters, module._buffers))
    tensors = [x for own in named for x in own.values() if x is not None]
    kind = tensors[0].device.type
    return (
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        tuple((x.data_ptr(), x.dtype, x.shape) for x in tensors),
        tuple(map(id, modules)),
    )
