"""Batches: a file of requests in, a file of answers out. Both for ``shadowkv serve --input`` and for the batch APIs."""
