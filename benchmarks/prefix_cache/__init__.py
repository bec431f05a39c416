"""Prompts that come again: what a hit costs and answers, what eviction keeps, bytes of what is stored."""
