"""Prompts of a given length: their texts, and how they are fitted to the length."""
