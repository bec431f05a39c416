"""Samples the next token of every row from its logits: temperature, top-k, top-p, min-p."""
