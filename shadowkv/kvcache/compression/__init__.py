"""Tokens leave the exact store: planned on the host, fitted, coded and written; prefill and decode both use it."""
