"""The hooks of transformers' generate, for a model whose cache is a pool of states."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import MaxLengthCriteria

from slipstream.models import graphs, greedy, packing
from slipstream.models.cache import CACHE, StateCache

DRAFTS = "drafts are verified in steps of several tokens, of which there are no graphs"
HOLES = "drafts want no padding after a prompt's tokens: they are left out"
# what transformers' generate passes to its loops of steps, and these on to the model with the rest
_OF_THE_LOOP = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")
_OF_PLAIN_PROMPTS = {CACHE, "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
# GenerationMixin comes after it: transformers looks for it among the bases of the model's class
_Base: Any = object


class Generation(_Base):
    """generate, with a StateCache made before the prompt and steps that are graphs."""

    decoding: graphs.Decoding

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as transformers' generate does.

        The decoding step is captured, on CUDA in a CUDA graph, once for each batch size, and later
        calls with that batch size replay it; `self.decoding` counts captures and replays, says why
        there was no graph (`reason`), turns them off (`enabled`) and gives memory back (`free`).

        cache_config={"key_dtype": "int8"} or "float8_e4m3fn" keeps keys and values in about half
        of bfloat16's bytes (StateCache).

        cache= is one of an earlier call, or of PrefixCache, also before transformers 5.24, which
        calls it past_key_values; input_ids have its tokens too. A row of it serves all beams and
        samples of that row.
        """
        if "cache" in kwargs and CACHE not in kwargs:
            kwargs[CACHE] = kwargs.pop("cache")
        # not where another thread's runs, or this is one inside of a streamer
        if not self.decoding.begin(self):  # pyright: ignore[reportArgumentType]
            return super().generate(*args, **kwargs)
        self.decoding.assistant = kwargs.get("assistant_model")
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.decoding.end()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses generate_batch and the like, which page keys and values and know no states."""
        raise NotImplementedError(
            "continuous batching: is not implemented; StateCache.pool() steps sequences that come "
            "and go"
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        made = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        given = model_kwargs.get(CACHE)
        drafted = generation_mode == GenerationMode.ASSISTED_GENERATION
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if isinstance(given, StateCache):
            if copies > 1 and given.rows == batch_size:
                given.batch_repeat_interleave(copies)
            self.decoding.claim(self, given)  # pyright: ignore[reportArgumentType]
        if given is not None or generation_config.use_cache is False:
            return made
        if drafted and not self._looks_up(generation_config):
            self.decoding.refuse(self.decoding.drafts_failure or DRAFTS, self.device)  # pyright: ignore[reportAttributeAccessIssue]
        key_dtype = key_dtype_of(generation_config)
        whose = generation_config.return_dict_in_generate or not graphs.own_modules(self)  # pyright: ignore[reportArgumentType]
        if whose or not self.decoding.can_lend:
            cache = StateCache(len(self.model.layers), max_cache_length, key_dtype)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            cache = self.decoding.lend(self, batch_size * copies, max_cache_length, key_dtype)  # pyright: ignore[reportArgumentType]
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs[CACHE] = cache
        return made

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers' loop of steps, without what takes the host longer than a graph runs.

        It waits for the device one step late, so that the next step is there before the last ends;
        the step that runs too much is dropped. Whoever wants more than the tokens gets
        transformers' own loop.
        """
        cache = model_kwargs.get(CACHE)
        given = generation_config.return_dict_in_generate or generation_config.compile_config
        if synced_gpus or given or not isinstance(cache, StateCache):
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        first = not getattr(generation_config, "is_assistant", False)
        ended = self._prompt_logits(input_ids, generation_config, model_kwargs, first)
        position_ids = model_kwargs.get("position_ids")
        positions = None if position_ids is None else position_ids[..., -1:]
        pad = generation_config._pad_token_tensor
        wanted = greedy.criteria(stopping_criteria)
        chooses = generation_config.do_sample or len(logits_processor) or streamer is not None
        plain = positions is None or positions.dim() == 2
        if wanted is not None and not chooses and plain and self.decoding.lends(cache):
            last, eos = wanted
            count = max(last - input_ids.shape[1], 1)
            logits = ended.to(input_ids.device)
            tokens = greedy.decode(self, cache, logits, positions, count, eos, pad)
            return torch.cat([input_ids, tokens], dim=-1)
        ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        by_length = all(type(criterion) is MaxLengthCriteria for criterion in stopping_criteria)
        last = stopping_criteria.max_length
        unfinished = input_ids.new_ones(input_ids.shape[0])
        # a cache of the caller's has to end with the last token
        is_late = streamer is None and not getattr(cache, "_is_user_defined", False)
        stop = Flag(input_ids.device, is_late)
        while True:
            logits = ended.to(copy=True, dtype=torch.float32, device=input_ids.device)
            scores = logits_processor(input_ids, logits)
            if generation_config.do_sample:
                tokens = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
            else:
                tokens = scores.argmax(-1)
            if ends:
                tokens = tokens * unfinished + pad.to(tokens.device) * (1 - unfinished)
            if stop.raised():  # by the token before
                break
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            if last is not None and input_ids.shape[1] >= last:
                break
            if not by_length:
                unfinished = unfinished & ~stopping_criteria(input_ids, None)
                if stop.set(unfinished):
                    break
            positions = None if positions is None else positions + 1
            step = {CACHE: cache, "position_ids": positions, "use_cache": True}
            ended = self(input_ids=tokens[:, None], **step).logits[:, -1]
        if streamer is not None:
            streamer.end()
        return input_ids

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        **options: Any,
    ) -> Any:
        cache, size = model_kwargs.get(CACHE), generation_config.prefill_chunk_size
        if CACHE != "cache" and size is not None and cache is not None and cache.get_seq_length():
            raise NotImplementedError(
                "prefill_chunk_size: want transformers 5.24 or newer beside a cache with tokens: "
                "before, its chunks begin with the tokens that the cache has"
            )
        return super()._prefill(input_ids, generation_config, model_kwargs, **options)

    def _prompt_logits(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], first: bool
    ) -> Tensor:
        """Logits [N, V] after a prompt, whose tokens the cache has then."""

        def prefill() -> Tensor:
            y = self._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=first)
            return y.logits[:, -1]

        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        positions = model_kwargs.get("position_ids")
        if (
            not first
            or generation_config.prefill_chunk_size is not None
            or model_kwargs.keys() - _OF_PLAIN_PROMPTS
            or self.config.consistent  # pyright: ignore[reportAttributeAccessIssue]
            or not self.decoding.takes_prompt(cache, input_ids)
            or not greedy.is_plain(input_ids, mask, positions)
        ):
            return prefill()
        positions = packing.text_positions(positions, *input_ids.shape)
        return self.decoding.prompt(self, cache, input_ids, positions, prefill)  # pyright: ignore[reportArgumentType]

    def _looks_up(self, generation_config: Any) -> bool:
        """Whether graphs verify drafts: words of the prompt, or an assistant's, beside greedy
        choices."""
        assistant = self.decoding.assistant
        known = greedy.assists(assistant, self)
        return (
            (known or (assistant is None and bool(generation_config.prompt_lookup_num_tokens)))
            and not generation_config.do_sample
            and not generation_config.return_dict_in_generate
            and self.decoding.drafts_failure is None
            and greedy.verifies(self)
        )

    def _assisted_decoding(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' loop, or greedy steps that verify drafts by graphs; without drafts where
        padding comes after tokens, from which a state could not go back.

        Raises:
            NotImplementedError: drafts by layers of the model itself, or from its hidden states.
            ValueError: a cache without its tokens in input_ids.
        """
        for name in ("assistant_early_exit", "speculation_type"):
            if (value := getattr(generation_config, name, None)) is not None:
                raise NotImplementedError(f"{name}: want None, got {value!r}")
        rest = synced_gpus, streamer
        if greedy.has_holes(kwargs.get("attention_mask")):
            own = {name: x for name, x in kwargs.items() if name not in _OF_THE_LOOP}
            self.decoding.refuse(HOLES, self.device)  # pyright: ignore[reportAttributeAccessIssue]
            given = logits_processor, stopping_criteria, generation_config, *rest
            return self._sample(input_ids, *given, **own)
        cache, wanted = kwargs.get(CACHE), greedy.criteria(stopping_criteria)
        given = synced_gpus or streamer is not None or len(logits_processor) > 0
        given = given or kwargs.get("inputs_embeds") is not None
        options = ("attention_mask", "position_ids")
        if kwargs.get("attention_mask") is None and input_ids.shape[1]:
            # an assistant that is told of no mask takes pad tokens among the words for padding
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        past = cache.get_seq_length() if isinstance(cache, StateCache) else 0
        if past and not past < input_ids.shape[1] == kwargs["attention_mask"].shape[1]:
            raise ValueError(
                f"input_ids: want the {past} tokens of the cache before the new ones, since drafts "
                f"are made of them, got {input_ids.shape[1]} tokens"
            )

        def by_transformers() -> Any:
            return super(Generation, self)._assisted_decoding(
                input_ids, logits_processor, stopping_criteria, generation_config, *rest, **kwargs
            )

        if (
            given
            or wanted is None
            or not isinstance(cache, StateCache)
            or not self.decoding.lends(cache)
            or not self._looks_up(generation_config)
            or input_ids.shape[0] != 1
            or not greedy.is_plain(input_ids, *(kwargs.get(name) for name in options))
        ):
            if isinstance(cache, StateCache) and self.decoding.lends(cache):
                # what it keeps of the tokens for `crop` is no part of a cache with graphs
                kwargs[CACHE] = StateCache(len(cache.layers), cache.max_length, cache.key_dtype)
                self.decoding.refuse(DRAFTS, self.device)  # pyright: ignore[reportAttributeAccessIssue]
            return by_transformers()
        out = self._prefill(input_ids, generation_config, kwargs, is_first_iteration=True)
        logits = out.logits[:, -1].to(input_ids.device)
        prompt, assistant = input_ids[0].tolist(), self.decoding.assistant
        ngram = generation_config.max_matching_ngram_size or greedy.NGRAM
        count = generation_config.prompt_lookup_num_tokens
        drafts: Any = nullcontext((partial(greedy.drafts_after, ngram=ngram), count))
        if assistant is not None:
            drafts = greedy.assistant_of(assistant, input_ids, wanted[0])
        try:
            with drafts as (guess, count):
                tokens = greedy.decode_with_drafts(
                    self, cache, prompt, logits, *wanted, count, guess
                )
            return torch.cat([input_ids, tokens], dim=-1)
        except greedy.AssistantBusy as e:  # this time
            self.decoding.refuse(str(e), self.device)  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as e:  # of any kind: transformers' loop needs no graph
            self.decoding.fail_drafts(e)
        # here, where the error no longer keeps what ran when it came
        kwargs[CACHE] = StateCache(len(cache.layers), cache.max_length, cache.key_dtype)
        del cache, out, logits
        return by_transformers()

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the mask unchanged: layers need no mask over queries and keys."""
        return kwargs.get("attention_mask")

    def _valid_auto_compile_criteria(
        self, model_kwargs: dict[str, Any], generation_config: Any
    ) -> bool:
        """Compiles only if asked to: graphs do at once what takes minutes to compile."""
        if generation_config.compile_config is None:
            return False
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,  # by its name here generate knows that it may be given
        **kwargs: Any,
    ) -> dict[str, Any]:
        kwargs = {name: x for name, x in kwargs.items() if name not in _OF_THE_LOOP}
        cache, mask = kwargs.get(CACHE), kwargs.get("attention_mask")
        if next_sequence_length is None and kwargs.get("is_first_iteration") and mask is not None:
            # transformers' loop with drafts would run again what a cache has already
            past = cache.get_seq_length() if isinstance(cache, StateCache) else 0
            if past and inputs_embeds is None and mask.shape[1] == input_ids.shape[1]:
                next_sequence_length = input_ids.shape[1] - past
        # a prompt may end in one embedding, too
        step = next_sequence_length == 1 and isinstance(cache, StateCache) and cache.rows
        if not step or (inputs_embeds is not None and kwargs.get("is_first_iteration")):
            return super().prepare_inputs_for_generation(
                input_ids,
                next_sequence_length=next_sequence_length,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        # a step: transformers' way of the same takes longer than a layer
        positions = kwargs.get("position_ids")
        unused = ("attention_mask", "is_first_iteration", "token_type_ids")
        inputs = {name: x for name, x in kwargs.items() if name not in unused and x is not None}
        inputs["input_ids"] = input_ids[:, -1:]
        if positions is not None:
            inputs["position_ids"] = positions[..., -1:]
        return inputs


def key_dtype_of(generation_config: Any) -> torch.dtype | None:
    """The option of a StateCache in `cache_config`."""
    given = getattr(generation_config, "cache_config", None) or {}
    known = (None, "int8", "float8_e4m3fn")
    if not isinstance(given, dict) or given.keys() - {"key_dtype"}:
        raise ValueError(f"cache_config: want a dict of key_dtype, got {given}")
    name = given.get("key_dtype")
    if name not in known:
        raise ValueError(f"cache_config: want one of {known} for key_dtype, got {name!r}")
    return None if name is None else getattr(torch, name)


class Flag:
    """Whether no sequence is unfinished.

    is_late: set() does not wait for a GPU, and the flag is read when asked for.
    """

    def __init__(self, device: torch.device, is_late: bool) -> None:
        is_late = is_late and device.type == "cuda"
        self.value = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=is_late)
        self.copied = torch.cuda.Event() if is_late else None

    def set(self, unfinished: Tensor) -> bool:
        self.value.copy_(~unfinished.any(), non_blocking=self.copied is not None)
        if self.copied is not None:
            self.copied.record()
            return False
        return bool(self.value)

    def raised(self) -> bool:
        if self.copied is not None:
            self.copied.synchronize()
        return bool(self.value)


def is_step(input_ids: Tensor | None, cache: StateCache | None, others: dict[str, Any]) -> bool:
    """Whether a call of the model is one token for each sequence of a cache that has some."""
    return (
        input_ids is not None
        and isinstance(cache, StateCache)
        and input_ids.dim() == 2
        and input_ids.shape == (cache.rows, 1)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not cache.records
        and (cache.has_open_rows or all(layer.is_initialized for layer in cache.layers))
        and all(x is None for x in others.values())
    )
