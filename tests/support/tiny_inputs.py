"""Random inputs for transformers' models with tiny configurations."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

TOKENS, ROWS = 12, 2
# images of a vision tower as numbers of patches: frames, rows, columns
GRID = ((1, 4, 4), (1, 4, 8))


def inputs_of(model: Any, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Random inputs for forward."""
    accepted = inspect.signature(model.forward).parameters
    required = {
        name for name, p in accepted.items()
        if p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }  # fmt: skip
    main = getattr(model, "main_input_name", "input_ids")
    given: dict[str, Tensor] = {}
    if "grid_thw" in required or "image_grid_thw" in required:
        return _patches(config, required)
    if "input_ids" in accepted:
        # rows of 3 answers each
        choices = (3,) if "MultipleChoice" in type(model).__name__ else ()
        given["input_ids"] = torch.randint(10, 50, (ROWS, *choices, TOKENS))
    elif "pixel_values" in accepted:
        given["pixel_values"] = _images(config)
    elif main in ("input_values", "input_features"):
        given[main] = _sound(main, config)
    elif main in required and len(required) == 1 and "hidden" in main:
        given[main] = torch.randn(ROWS, TOKENS, config.hidden_size)
    else:
        raise NotImplementedError(f"no inputs are made for {main}")
    if "pixel_values" in required and "pixel_values" not in given:
        given["pixel_values"] = _images(config)
    if "bbox" in accepted:
        given["bbox"] = torch.zeros(ROWS, TOKENS, 4, dtype=torch.int64)
    if "ForSequenceClassification" in type(model).__name__ and config.is_encoder_decoder:
        # a class of what is decoded at the last token, which is the same text
        given["input_ids"][:, -1] = config.eos_token_id
    elif "decoder_input_ids" in accepted and config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(10, 50, (ROWS, TOKENS - 3))
    return given


def with_images(inputs: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """The same for models that read images beside text, although their signature does not say."""
    return inputs | {"pixel_values": _images(config)}


def _images(config: PreTrainedConfig) -> Tensor:
    config = getattr(config, "vision_config", None) or config
    size, channels = getattr(config, "image_size", 64), getattr(config, "num_channels", None) or 3
    height, width = size if isinstance(size, list | tuple) else (size or 64,) * 2
    frames = getattr(config, "num_frames", None)
    shape = (ROWS, frames) if isinstance(frames, int) else (ROWS,)
    return torch.randn(*shape, channels, height, width)


def _patches(config: PreTrainedConfig, required: set[str]) -> dict[str, Tensor]:
    """A vision tower that takes patches of several images, one behind the other."""
    grid = next(name for name in ("grid_thw", "image_grid_thw") if name in required)
    main = next(n for n in ("hidden_states", "pixel_values") if n in required)
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    frames = getattr(config, "temporal_patch_size", 1)
    patches = sum(t * h * w for t, h, w in GRID)
    width = channels * frames * config.patch_size**2
    return {main: torch.randn(patches, width), grid: torch.tensor(GRID)}


def _sound(main: str, config: PreTrainedConfig) -> Tensor:
    config = getattr(config, "encoder_config", None) or getattr(config, "audio_config", config)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    if main == "input_values":
        if hasattr(config, "time_stride"):  # the spectrogram itself
            return torch.randn(ROWS, config.max_length, config.num_mel_bins)
        return torch.randn(ROWS, 2000)
    positions = 2 * getattr(config, "max_source_positions", 50)
    return torch.randn(ROWS, mels, min(positions, 256))
