"""Residual addition and the RMSNorm that follows it."""
