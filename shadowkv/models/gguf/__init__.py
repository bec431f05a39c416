"""GGUF files: config, weights and tokeniser in one file."""
