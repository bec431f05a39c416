"""A short causal convolution of each channel. The last inputs of a sequence are its state."""
