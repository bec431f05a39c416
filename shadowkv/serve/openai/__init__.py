"""The OpenAI API with vLLM's extensions, and the code that answers text requests, which all other APIs use."""
