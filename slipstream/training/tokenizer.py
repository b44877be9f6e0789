"""The tokenizer: an existing one, or a byte-level BPE trained on the training text."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.training.config import Tokenizer
from slipstream.training.corpus import Corpus

END = "<|endoftext|>"
# Bytes: the time to train on a word grows with the square of its length.
LONGEST_WORD = 64


def obtain(config: Tokenizer, corpus: Corpus, directory: Path) -> PreTrainedTokenizerFast:
    """The run's tokenizer from `directory`, where the first call puts it.

    Raises:
        ValueError: the tokenizer has no end-of-text token or is not byte-level.
    """
    if not directory.is_dir():
        made = train(config, corpus) if config.path is None else _load(config.path)
        made.save_pretrained(directory)
    tokenizer = _load(str(directory))
    end_of_text(tokenizer)
    return tokenizer


def end_of_text(tokenizer: PreTrainedTokenizerFast) -> int:
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ValueError(f"tokenizer: want one end-of-text token (eos_token_id), got {end}")
    return end


def train(config: Tokenizer, corpus: Corpus) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.FixedLength(length=LONGEST_WORD)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, cut])  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_sample(corpus, config.train_bytes), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Bytes of text each id stands for, int64 [vocabulary]; 0 for special tokens."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    if (spec.get("decoder") or {}).get("type") != "ByteLevel":
        raise ValueError(
            "tokenizer: want a byte-level one, so that bits per byte can be counted exactly"
        )
    size = [0] * len(tokenizer)
    for token, i in tokenizer.get_vocab().items():
        size[i] = len(token)  # one character of the byte-level alphabet per byte
    for i, added in tokenizer.added_tokens_decoder.items():
        size[i] = 0 if added.special else len(added.content.encode())
    return torch.tensor(size, device="cpu")


def _load(path: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(path)


def _sample(corpus: Corpus, limit: int) -> Iterator[str]:
    """Up to a number of bytes: of each file what brings it to the share of the files so far."""
    total, seen, taken = sum(file.size for file in corpus.files), 0, 0
    for file in corpus.files:
        seen += file.size
        pieces = corpus.pieces(file)
        while taken * total < limit * seen and (piece := next(pieces, None)):
            taken += len(piece.text.encode())
            yield piece.text
