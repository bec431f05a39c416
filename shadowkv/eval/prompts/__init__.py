"""Prompts of a given length: the texts that they are made of, and how they are made to fit."""
