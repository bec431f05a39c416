"""shadowkv: serves long-context LLMs in large batches."""

__version__ = "0.1.0"
