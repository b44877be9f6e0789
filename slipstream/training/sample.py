"""Text from a trained model, printed while it is made."""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

import slipstream.models  # noqa: F401  registers the model with AutoModelForCausalLM
from slipstream.training.trainer import newest_checkpoint


def load(directory: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a directory that save_pretrained or a training run has written.

    Raises:
        FileNotFoundError: there is no model in it.
        ValueError: the weights are not those of the model in config.json.
    """
    directory = saved_directory(directory)
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = weights(directory)
    model = model.eval().to(torch.device(device))  # pyright: ignore[reportArgumentType]
    return model, AutoTokenizer.from_pretrained(directory)


def saved_directory(directory: Path) -> Path:
    """It, or the newest checkpoint in it.

    Raises:
        FileNotFoundError: there is no model in it.
    """
    if (directory / "config.json").is_file():
        return directory
    found = newest_checkpoint(directory)
    if found is None:
        raise FileNotFoundError(f"checkpoint: want a directory with a model, got {directory}")
    return found


def weights(directory: Path) -> Any:
    """The model with exactly the weights of the directory's safetensors files."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, use_safetensors=True, output_loading_info=True
    )
    model, loading = loaded
    for what in ("missing", "unexpected"):
        if names := sorted(map(str, loading[f"{what}_keys"])):
            raise ValueError(f"{directory}: {what} weights: {', '.join(names[:3])}")
    return model


def generate(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    batch: int = 1,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> float:
    """Prints each prompt and what follows, a batch at a time, of a single prompt token by token.

    Returns:
        New tokens per second, with the prompts' time.

    Raises:
        ValueError: there are no prompts, or one is empty.
    """
    if not prompts:
        raise ValueError("prompts: want some lines of text, got none")
    set_seed(seed)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if len(prompts) == 1 else None
    made, seconds = 0, 0.0
    for begin in range(0, len(prompts), batch):
        part = prompts[begin : begin + batch]
        inputs = tokenizer(part, return_tensors="pt", padding=True, padding_side="left")
        ids, mask = (inputs[x].to(model.device) for x in ("input_ids", "attention_mask"))
        if not bool(mask.any(1).all()):
            raise ValueError("prompts: want some text in each, got one without a token")
        start = time.perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
            streamer=streamer,
            **sampling,
        )
        new = out[:, ids.shape[1] :].cpu()
        seconds += time.perf_counter() - start
        made += int((new != tokenizer.pad_token_id).sum())
        for prompt, row in zip(part, new):
            if streamer is None:
                print(prompt + tokenizer.decode(row, skip_special_tokens=True), flush=True)
    return made / seconds
