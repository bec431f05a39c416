"""Matrix products with rows of quantised blocks, which stay as GGUF files store them."""
