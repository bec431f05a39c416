"""A short causal convolution of each channel, with the last inputs of a sequence as its state."""
