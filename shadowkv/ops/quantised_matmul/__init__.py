"""Matrix products with rows of quantised blocks, kept as stored in GGUF files."""
