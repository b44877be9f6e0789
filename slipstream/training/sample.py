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


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> float:
    """Prints the prompt and what follows; returns new tokens per second, with the prompt's time.

    Raises:
        ValueError: the prompt is empty.
    """
    inputs = _encoded(tokenizer, prompt, model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("prompt: want some text, got none")
    set_seed(seed)
    begin = time.perf_counter()
    out = model.generate(
        **inputs,
        max_new_tokens=tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **_sampling(temperature, top_p),
    )
    made = out.shape[1] - inputs["input_ids"].shape[1]
    return made / (time.perf_counter() - begin)


def continue_all(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    batch: int,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> float:
    """Prints each prompt and what follows, a batch at a time; returns new tokens per second.

    Raises:
        ValueError: there are no prompts, or one is empty.
    """
    if not prompts:
        raise ValueError("prompts: want some lines of text, got none")
    set_seed(seed)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    made, seconds = 0, 0.0
    for begin in range(0, len(prompts), batch):
        part = prompts[begin : begin + batch]
        inputs = _encoded(tokenizer, part, model.device, padding=True, padding_side="left")
        if not bool(inputs["attention_mask"].any(1).all()):
            raise ValueError("prompts: want some text in every line, got one without a token")
        start = time.perf_counter()
        out = model.generate(
            **inputs,
            max_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
            **_sampling(temperature, top_p),
        )
        new = out[:, inputs["input_ids"].shape[1] :].cpu()
        seconds += time.perf_counter() - start
        made += int((new != tokenizer.pad_token_id).sum())
        for prompt, row in zip(part, new):
            print(prompt + tokenizer.decode(row, skip_special_tokens=True), flush=True)
    return made / seconds


def _encoded(tokenizer: Any, text: Any, device: Any, **options: Any) -> dict[str, torch.Tensor]:
    given = tokenizer(text, return_tensors="pt", **options).to(device)
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def _sampling(temperature: float, top_p: float) -> dict[str, Any]:
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
