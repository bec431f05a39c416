"""Quantized rows of weights and their forms. Weight matrices, ops and readers of checkpoints use them."""
