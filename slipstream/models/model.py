"""The decoder-only language model: embedding, blocks, norm, head, as transformers wants a model.

Every sequence has a state per layer, so padding and packing are one thing: a padded batch is run
as its sequences packed one after another (packing.py), and one decoding step of it needs nothing.
"""

from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from slipstream.compiler import triton_cache_key
from slipstream.models import arguments, config, generation, graphs, mlps, rollback, tensor_parallel
from slipstream.models import consistent as blocks
from slipstream.models.block import Block, apply_norm, make_norm, with_norms_behind
from slipstream.models.cache import CACHE, StateCache, named
from slipstream.models.first_step import before_loss, compile_blocks, compile_with_embedding
from slipstream.models.packing import (
    Sequences,
    find_sequences,
    given_offsets,
    next_tokens,
    text_positions,
)
from slipstream.nn import Embedding, decoding, linear
from slipstream.ops._fp32 import widen
from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from slipstream.runtime import context_parallel, token_ids
from slipstream.runtime.token_ids import IGNORED


class SlipstreamPreTrainedModel(PreTrainedModel):
    config_class = config.SlipstreamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: save_pretrained would copy this file; config.AUTO_MAP names the classes."""

    def _sequences(
        self,
        batch: int,
        tokens: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: StateCache | None,
        cu_seqlens: Tensor | None,
        others: dict[str, Any],
    ) -> Sequences | None:
        """Finds the sequences in the arguments of a forward; `others` has those of PACKING."""
        packing = arguments.check_arguments(others)
        offsets = given_offsets(batch, tokens, cu_seqlens, **packing)
        past = 0 if cache is None else cache.get_seq_length()
        return find_sequences(
            batch, tokens, attention_mask, position_ids, offsets, packing.get("seq_idx"), past
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """Loads as transformers' does, whose distributed_config=DistributedConfig(tp_size=n)
        divides the heads among n processes (shard_heads); each reads the whole checkpoint."""
        found = super().from_pretrained(*args, **options)
        tensor_parallel.shard_planned_heads(found[0] if isinstance(found, tuple) else found)
        return found

    def save_pretrained(
        self, save_directory: str | PathLike[str], *args: Any, **options: Any
    ) -> Any:
        """Saves as transformers' does. Where heads are sharded every rank calls it, and the first
        writes whole tensors."""
        if tensor_parallel.is_sharded(self):
            whole = tensor_parallel.whole_state_dict(self, options.get("state_dict"))
            if self.config.tie_word_embeddings:  # transformers knows it by their memory
                whole.pop("lm_head.weight", None)
            options["state_dict"] = whole
            options.setdefault("is_main_process", torch.distributed.get_rank() == 0)
        return super().save_pretrained(save_directory, *args, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The parameters of one module, without its submodules'.

        transformers calls this after construction, and again for what a checkpoint lacks. While it
        does, the functions of nn.init, which reset_parameters uses, leave loaded parameters alone.
        """
        if isinstance(module, mlps.Dense | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]


class SlipstreamModel(SlipstreamPreTrainedModel):
    """Token ids to hidden states.

    Args of forward:
        input_ids [B, T], or inputs_embeds [B, T, D].
        attention_mask [B, T] or, with a cache, [B, past + T]: 0 where there is padding, on
            either side. Not looked at in a compiled or captured step (T = 1 after the first call).
        position_ids [1 or B, T]: positions of the tokens, for layers that use them. Without
            offsets and seq_idx a new sequence begins in a row where position_ids[t] is not
            position_ids[t - 1] + 1. A tensor [3, 1 or B, T] must hold one table three times.
        cu_seqlens int32 or int64 [N+1]: offsets of sequences packed in a batch of one.
        parents int32 or int64 [N]: beside cu_seqlens, the earlier sequence at whose end each goes
            on, -1 for none: a row of prefix trees (PrefixTree), without padding or a cache.
        cu_seq_lens_q, cu_seq_lens_k: the same, as transformers' collators call them.
        seq_idx [1 or B, T]: the number of each token's sequence; one begins where it changes.
        cache, or past_key_values, its name before transformers 5.24: the StateCache of an earlier
            call, changed in place.
        use_cache: return a StateCache; None means config.use_cache when not training.
        context: a slipstream.parallel.ContextParallel: the tokens are this rank's, without padding,
            offsets, seq_idx or a cache; positions count in the whole sequence if None.
        sequences: what find_sequences made of the arguments above, which are not looked at then.
        Others that callers pass, and that do nothing here: arguments.py.

    Raises:
        ValueError: an id outside the vocabulary, with its position; on CUDA in the next call.
            Offsets and seq_idx that do not agree; position_ids of another shape.
        TypeError: an argument of another type, or unknown. NotImplementedError: output_attentions.
    """

    def __init__(self, config: config.SlipstreamConfig) -> None:
        super().__init__(config)
        triton_cache_key.begin()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)])
        self.depth = None
        if config.attention_residuals is not None:
            sizes = config.hidden_size, config.num_hidden_layers, config.attention_residuals
            self.depth = mlps.AttentionResiduals(*sizes, config.norm_eps)
        self.embed_norm = make_norm(config) if config.embedding_norm else None
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        blocks.prepare(self)
        self.post_init()

    @can_return_tuple
    @arguments.checked
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        output_hidden_states: bool | None = None,
        cache: StateCache | None = None,
        sequences: Sequences | None = None,
        context: context_parallel.ContextParallel | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        cache = arguments.the_cache(cache, past_key_values, len(self.layers))
        batch, tokens = arguments.shape_of(input_ids, inputs_embeds)
        if use_cache is None:
            use_cache = context is None and self.config.use_cache and not self.training
        cache = arguments.cache_of_call(self, cache, use_cache)
        position_ids = text_positions(position_ids, batch, tokens)
        if context is None and sequences is None:
            sequences = self._sequences(
                batch, tokens, attention_mask, position_ids, cache, cu_seqlens, others
            )
        else:
            arguments.check_arguments(others)
        compile_with_embedding(self, input_ids, sequences, position_ids, context, cache)
        h = self._embed(input_ids, inputs_embeds)
        cu_seqlens = None
        if sequences is not None:
            h, cu_seqlens = sequences.pack(h), sequences.cu_seqlens
            if position_ids is not None:
                position_ids = sequences.pack(position_ids.expand(batch, -1))
        arguments.expect_rows(cache, batch if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        keep, every = bool(output_hidden_states), []
        compile_blocks(self, h, cu_seqlens, position_ids, context, cache)
        with decoding.shared_tables():
            if self.config.consistent:
                h = blocks.run(self, h, cu_seqlens, cache, position_ids, context, keep)
            elif cache is None or torch.is_grad_enabled():
                h, every = self._run(h, cu_seqlens, cache, keep, position_ids, context)
            else:
                h, every = self._continue(h, sequences, cache, keep, position_ids, tokens)
        if cache is not None:
            cache.step_on(tokens, None if sequences is None else sequences.absent(batch, tokens))
        if sequences is not None:
            h, *every = (sequences.unpack(x, batch, tokens) for x in (h, *every))
        return BaseModelOutputWithPast(
            last_hidden_state=h,
            **named(cache if use_cache else None),
            hidden_states=tuple(every) if output_hidden_states else None,
        )

    def step(
        self, input_ids: Tensor, cache: StateCache, position_ids: Tensor | None = None
    ) -> Tensor:
        """Computes a token for each row of a cache that has some: ids [N, 1] -> hidden states
        [N, 1, D].

        What a decoding step does on a device, and nothing else: the cache's tensors are updated in
        place, no argument is checked and no token counted (StateCache.step_on), so that it can be a
        graph. Softmax layers look at all places of the cache, whatever is used.
        """
        h = self._first_normed(self.embed_tokens(input_ids))
        if torch.compiler.is_compiling():
            return self._advance(h, cache, False, position_ids, True)[0]
        if position_ids is None:
            position_ids = cache.next_positions()
        with decoding.step():
            return self._advance(h, cache, False, position_ids, True)[0]

    def verify(self, input_ids: Tensor, cache: StateCache, drafts: decoding.Drafts) -> Tensor:
        """Does `step` for T tokens, of which only the first is known to be right: ids [N, T] ->
        hidden states [N, T, D]. The next call moves the states on by drafts.accepted of them.

        A model with consistent=True has no states but those of whole blocks: NotImplementedError.
        """
        if self.config.consistent:
            raise NotImplementedError("verify: drafts are not implemented for a consistent model")
        with decoding.step(drafts):
            h = self._first_normed(self.embed_tokens(input_ids))
            return self._advance(h, cache, False, None, True)[0]

    def _continue(
        self,
        h: Tensor,
        sequences: Sequences | None,
        cache: StateCache,
        keep: bool,
        positions: Tensor | None,
        columns: int,
    ) -> tuple[Tensor, list[Tensor]]:
        """Does _run without gradients; the cache is updated in place."""
        cache.reserve(columns)
        tokens = h.shape[1]
        if sequences is not None and not (cache.records and sequences.ends_alone(columns)):
            return self._run(h, sequences.cu_seqlens, cache, keep, positions, None)
        empty = not all(layer.is_initialized for layer in cache.layers)
        if not empty and tokens == columns:
            return self._advance(h, cache, keep, positions)
        # `crop` may want the last tokens of a prompt back, with a draft behind it
        first = min(max(tokens - rollback.WINDOW, 1) if cache.records else tokens, tokens) * empty
        cache.step_on(columns - tokens)
        parts, rest = [], slice(first, None)
        if first or not tokens:
            cut = None if positions is None else positions[:, :first]
            parts.append(self._run(h[:, :first], None, cache, keep, cut, None))
            cache.step_on(first)
            cache.reserve(tokens - first)  # in tensors that this made
        if first < tokens:
            cut = None if positions is None else positions[:, rest]
            parts.append(self._advance(h[:, rest], cache, keep, cut))
        cache.step_on(-first - (columns - tokens))
        if len(parts) == 1:
            return parts[0]
        every = [torch.cat(pair, 1) for pair in zip(*(every for _, every in parts))]
        return torch.cat([y for y, _ in parts], 1), every

    def _advance(
        self,
        h: Tensor,
        cache: StateCache,
        keep: bool,
        positions: Tensor | None,
        fixed: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Does _run for tokens that follow those in the cache, which is updated in place."""
        every, first_value, sources, normed = [], None, self._sources(h), None
        for i, ((block, norm), layer) in enumerate(zip(with_norms_behind(self, h), cache.layers)):
            h = self._mixed(i, h, sources)
            every += [h] if keep else []
            options: Any = {"positions": positions, "fixed": fixed, "next_norm": norm}
            y, normed, value = block(h, first_value, layer=layer, normed=normed, **options)
            first_value = value if first_value is None else first_value
            h, sources = y, self._with_added(i, sources, h, y)
        h = self._normed(self._mixed(len(self.layers), h, sources)) if normed is None else normed
        return h, [*every, h] if keep else []

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if inputs_embeds is not None:
            return self._first_normed(inputs_embeds)
        assert input_ids is not None
        table = self.embed_tokens
        if not isinstance(table, Embedding):
            # an adapter, or another table of the user's: its lookup may not check the ids
            rows = getattr(table, "num_embeddings", self.config.vocab_size)
            token_ids.expect_ids("input_ids", input_ids, rows)
            input_ids = token_ids.clamped(input_ids, rows)
        return self._first_normed(table(input_ids))

    def _first_normed(self, h: Tensor) -> Tensor:
        return h if self.embed_norm is None or self.config.consistent else self.embed_norm(h)

    def _sources(self, h: Tensor) -> list[Tensor]:
        """The tensors that attention residuals mix, if the model has them."""
        return [widen(h) if self.config.residual_in_fp32 else h] if self.depth is not None else []

    def _mixed(self, layer: int, h: Tensor, sources: list[Tensor]) -> Tensor:
        """The input of a layer, or of the norm after the last; h is the output before it."""
        return h if self.depth is None or layer == 0 else self.depth(layer, sources)

    def _with_added(self, layer: int, sources: list[Tensor], h: Tensor, y: Tensor) -> list[Tensor]:
        if self.depth is None:
            return sources
        # each block of a model may be on a device of its own
        return self.depth.with_added(layer, sources, (y - h.to(y.device)).to(sources[0].device))

    def _normed(self, h: Tensor) -> Tensor:
        return apply_norm(h, self.norm, self) if self.config.residual_in_fp32 else self.norm(h)

    def _run(
        self,
        h: Tensor,
        cu_seqlens: Tensor | None,
        cache: StateCache | None,
        keep: bool,
        positions: Tensor | None,
        context: context_parallel.ContextParallel | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The blocks and the last norm; `keep` also collects what goes into each block."""
        every, first_value, sources = [], None, self._sources(h)
        for i, block in enumerate(self.layers):
            h = self._mixed(i, h, sources)
            if keep:
                every.append(h)
            state = None
            if cache is not None and cache.layers[i].is_initialized:
                state = cache.layers[i].wide(h.dtype)
            options: Any = {"cu_seqlens": cu_seqlens, "context": context, "positions": positions}
            options |= {"state": state, "use_cache": cache is not None}
            y, state, value = block(h, first_value, **options)
            first_value = value if first_value is None else first_value
            if cache is not None:
                mixer: Any = block.mixer
                if cache.layers[i].write(arguments.expect_state(state), mixer):
                    cache.graphs.clear()
            h, sources = y, self._with_added(i, sources, h, y)
        h = self._normed(self._mixed(len(self.layers), h, sources))
        return h, [*every, h] if keep else []


class SlipstreamForCausalLM(SlipstreamPreTrainedModel, generation.Generation, GenerationMixin):
    """The language model with its head.

    Args of forward, besides those of SlipstreamModel:
        labels [B, T]: input_ids again, -100 where there is no loss; shifted here, and never across
            the border of two sequences, but for parents, whose end predicts the first token of each
            child. The loss itself holds no logits.
        num_items_in_batch: divides the summed loss, a tensor of 0 as 1; None is the number of
            labels that count, with a context of those of all ranks, whose losses then add up.
        logits_to_keep: how many last positions get logits, or which; 0 is all of them.
        skip_logits: return no logits. None skips them in training with labels, unless
            logits_to_keep is given; a model in eval mode returns them, as those of transformers do.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True

    def __init__(self, config: config.SlipstreamConfig) -> None:
        super().__init__(config)
        self.model = SlipstreamModel(config)
        self.lm_head = mlps.Dense(config.hidden_size, config.vocab_size)
        self.decoding = graphs.Decoding()
        self.post_init()

    @can_return_tuple
    @arguments.checked
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        cache: StateCache | None = None,
        skip_logits: bool | None = None,
        context: context_parallel.ContextParallel | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        if use_cache is None and labels is not None:
            use_cache = False
        cache, sequences = arguments.the_cache(cache, past_key_values, len(self.model.layers)), None
        plain = labels is None and attention_mask is None and not output_hidden_states
        if self.decoding.here and plain and generation.is_step(input_ids, cache, others):
            assert input_ids is not None
            assert cache is not None
            return self._graph_step(input_ids, cache, position_ids)
        if labels is not None and context is None:
            batch, tokens = labels.shape
            position_ids = text_positions(position_ids, batch, tokens)
            sequences = self._sequences(
                batch, tokens, attention_mask, position_ids, cache, cu_seqlens, others
            )
            others = {name: x for name, x in others.items() if name not in arguments.PACKING}
            attention_mask = cu_seqlens = None
        with before_loss(self, labels, num_items_in_batch):
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                cu_seqlens=cu_seqlens,
                output_hidden_states=output_hidden_states,
                sequences=sequences,
                context=context,
                **others,
            )
        h = out.last_hidden_state
        loss = logits = None
        if labels is not None:
            predicting = h
            if context is None:
                target = next_tokens(labels, sequences, IGNORED)
            else:
                share = context.share(labels.shape[1])
                target, predicting = share.next_tokens(labels, IGNORED), share.predicting(h)
                if num_items_in_batch is None:
                    num_items_in_batch = context.sum((target != IGNORED).sum())
            loss = self._loss(predicting, target, num_items_in_batch)
        if skip_logits is None:
            skip_logits = self.training and labels is not None and logits_to_keep is None
        if not skip_logits:
            logits = blocks.logits_of(self, arguments.at_places(h, logits_to_keep))
        return CausalLMOutputWithPast(
            loss=loss,  # pyright: ignore[reportArgumentType]
            logits=logits,  # pyright: ignore[reportArgumentType]
            **named(getattr(out, CACHE)),
            hidden_states=out.hidden_states,
        )

    def _graph_step(
        self, input_ids: Tensor, cache: StateCache, position_ids: Tensor | None
    ) -> CausalLMOutputWithPast:
        """A decoding step of generate, by a CUDA graph where there is one."""
        cache.reserve(1)
        positions = text_positions(position_ids, *input_ids.shape)
        given = (input_ids,) if positions is None else (input_ids, positions)
        step, key = graphs.decoding_step(self, cache)
        logits = self.decoding.run(step, cache, given, key, input_ids.device)
        cache.step_on(1)
        return CausalLMOutputWithPast(logits=logits, **named(cache))  # pyright: ignore[reportArgumentType]

    def _loss(self, h: Tensor, target: Tensor, num_items: Tensor | int | None) -> Tensor:
        """Cross entropy in nats, without ever holding all logits.

        With an adapter, hook or wrapper on the head, of the logits that its call returns.
        """
        head = self.lm_head
        reduction = "mean" if num_items is None else "sum"
        options: dict[str, Any] = {"ignore_index": IGNORED, "reduction": reduction}
        group = head.__dict__.get("vocabulary_group")  # of shard_heads
        if linear.plain_linear(head) or group is not None:
            rows, target = blocks.head_input(head, h).flatten(0, 1), target.flatten().to(h.device)
            weight: Any = head.weight
            bias: Any = head.bias
            if group is not None:
                weight, bias = weight.to_local(), None if bias is None else bias.to_local()
            options["group"] = group
            loss = linear_cross_entropy(rows, weight, target, bias, **options)
        else:
            loss = cross_entropy(y := head(h), target.to(y.device), **options)
        return arguments.per_item(loss, num_items)
