"""Matrix products for mixtures of experts: each row is multiplied with its own expert's matrix."""
