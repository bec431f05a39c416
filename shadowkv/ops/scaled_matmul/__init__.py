"""Matrix products of 8-bit floats with a scale for every row of either side."""
