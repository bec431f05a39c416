"""What is known of a model beside its weights: ModelConfig, read from the fields of a Hugging Face config."""
