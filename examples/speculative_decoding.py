"""Decodes with a small model that guesses ahead: python examples/speculative_decoding.py

The draft model guesses a few tokens one by one, the target model checks them in one call. After a
wrong guess both forget what they read behind it.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.models.cache import StateCache

WORDS, GUESSES = 16, 4


class Reader:
    """A model, and its state after the tokens that it has read."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, StateCache(model.config.num_hidden_layers)
        self.cache.activate_past_recording()  # for crop()

    def read(self, tokens: list[int]) -> Tensor:
        """Returns what it takes for the next token, after each of these."""
        logits = self.model(torch.tensor([tokens]), past_key_values=self.cache).logits
        return logits[0].argmax(-1)


@torch.no_grad()
def speculative(target: Any, draft: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The tokens that the target takes for likeliest, and how many of them a call of it gives."""
    readers, calls = (Reader(target), Reader(draft)), 1
    first, _ = (int(x.read(prompt)[-1]) for x in readers)
    tokens = [*prompt, first]
    while len(tokens) < len(prompt) + count:
        guesses: list[int] = []
        while len(guesses) < GUESSES:
            guesses.append(int(readers[1].read([tokens[-1], *guesses][-1:])[-1]))
        readers[1].read(guesses[-1:])
        wanted = readers[0].read([tokens[-1], *guesses]).tolist()
        right = next((i for i, x in enumerate(guesses) if x != wanted[i]), GUESSES)
        for reader in readers:
            reader.cache.crop(right - GUESSES)
        tokens += [*guesses[:right], wanted[right]]
        calls += 1
    return tokens[: len(prompt) + count], count / calls


def trained(mixer: str, width: int, steps: int, words: int) -> Any:
    """A model that counts so far, again and again."""
    sizes: dict[str, Any] = {"hidden_size": width, "num_heads": 2, "vocab_size": WORDS}
    model = SlipstreamForCausalLM(SlipstreamConfig(mixers=[mixer], **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        ids = (torch.randint(words, (8, 1)) + torch.arange(24)) % words
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main(steps: int = 40) -> float:
    """Returns how many tokens a call of the target model gives; at most GUESSES + 1."""
    torch.manual_seed(0)
    target = trained("gated_deltanet", 64, steps, WORDS)
    draft = trained("retention", 32, steps, WORDS // 2)  # some of its guesses are wrong
    tokens, each = speculative(target, draft, [3, 4, 5], 40)
    alone = target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=40, do_sample=False)
    assert tokens == alone[0].tolist()
    print(f"{each:.1f} tokens a call, the same as without the draft model")
    return each


if __name__ == "__main__":
    main()
