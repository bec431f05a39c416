"""Samples the next token of every row from its logits, with temperature, top-k, top-p and min-p."""
