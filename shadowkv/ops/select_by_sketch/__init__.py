"""The chunks that a 2-bit key sketch finds among the runs of tokens with the best sign scores."""
