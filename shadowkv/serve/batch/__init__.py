"""Batches: a file of requests becomes a file of answers, with ``shadowkv serve --input`` or through the batch APIs."""
