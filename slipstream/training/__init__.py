"""Training a language model on text files: config, corpus, tokenizer, packing, the run itself."""
