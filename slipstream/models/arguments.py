"""Arguments of the models' forward that transformers, PEFT and TRL pass to every model.

    output_attentions            None or False: the mixers make no attention weights
    cache_position               the cache itself counts its tokens
    token_type_ids               the model has no embedding of segments
    max_length_q, max_length_k   follow from the offsets
    cu_seq_lens_q, cu_seq_lens_k, seq_idx   where packed sequences begin: packing.py

Any other one is an error unless it is None: a misspelled argument would do nothing otherwise.
"""

from typing import Any

from slipstream.models.cache import StateCache

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_WITHOUT_EFFECT = ("cache_position", "token_type_ids", "max_length_q", "max_length_k")


def check_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Those of PACKING among them, if the others may be left out of account.

    Raises:
        NotImplementedError: output_attentions. TypeError: an argument that is not known.
    """
    for name, value in given.items():
        if value is None or name in (*PACKING, *_WITHOUT_EFFECT):
            continue
        if name != "output_attentions":
            raise TypeError(f"{name}: unexpected argument of the model, got {value!r}")
        if value:
            raise NotImplementedError(
                "output_attentions: want None or False, since the mixers make no attention "
                f"weights, got {value!r}"
            )
    return {name: given[name] for name in PACKING if given.get(name) is not None}


def refuse_beside_context(**given: Any) -> None:
    """Raises ValueError for what a context says itself, or cannot have."""
    for name, x in given.items():
        if x is not None and x is not False:
            raise ValueError(f"{name}: want None beside a context, which says where sequences are")


def the_cache(
    cache: StateCache | None, past_key_values: StateCache | None, num_layers: int | None = None
) -> StateCache | None:
    """The cache under either of its two names; num_layers: how many layers it must have."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache: want it or past_key_values, its older name, got both")
    found = past_key_values if cache is None else cache
    if found is not None and num_layers is not None:
        _expect_cache(found, num_layers)
    return found


def _expect_cache(cache: object, num_layers: int) -> None:
    if not isinstance(cache, StateCache):
        raise TypeError(
            "cache (past_key_values): want a slipstream.models.StateCache, got "
            f"{type(cache).__name__}; pass None and the model makes its own"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"cache (past_key_values): want a cache of {num_layers} layers, got {len(cache.layers)}"
        )
