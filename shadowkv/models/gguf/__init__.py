"""GGUF files: config, weights and tokenizer in one file."""
