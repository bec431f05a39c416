"""The OpenAI API with vLLM's extras, and what answers requests for text, which all other APIs use."""
