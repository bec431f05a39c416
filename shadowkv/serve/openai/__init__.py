"""The OpenAI API with vLLM's extensions, and the code that answers text requests. All other APIs use this code, too."""
