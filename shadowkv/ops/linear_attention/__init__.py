"""Linear attention: a short causal convolution, and the gated delta rule (Gated DeltaNet, arXiv:2412.06464)."""
