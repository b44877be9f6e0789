"""Training a language model on text files: config, corpus, tokenizer, packing, the run itself."""

from slipstream.runtime.captured_loss import CapturedLoss as CapturedLoss
