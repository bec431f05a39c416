"""Matrix products of 8-bit floats, with a scale per row of activations and per row of weights."""
