"""Selects chunks by a 2-bit key sketch: the best chunks in the runs of tokens with the best sign scores."""
