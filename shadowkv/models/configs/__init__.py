"""ModelConfig: everything about a model except its weights, read from the fields of a Hugging Face config."""
