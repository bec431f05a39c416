"""Copies keys and values of tokens into pages, out of pages, and to the tensors in which prefill keeps them."""
