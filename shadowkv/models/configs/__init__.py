"""ModelConfig: what is known of a model besides its weights, read from the fields of a Hugging Face config."""
