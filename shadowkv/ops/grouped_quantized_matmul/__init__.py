"""Matrix products for mixtures of experts whose weights are quantized: each row is multiplied with its own expert's
matrix."""
