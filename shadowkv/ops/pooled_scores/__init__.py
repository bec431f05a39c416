"""Scores blocks of a few tokens by keys that are computed from their tokens' index keys (QSA, of the Qwen4 preview)."""
