"""Linear attention: a short causal convolution, the gated delta rule (Gated DeltaNet, arXiv:2412.06464), and the state
space model of Mamba-2 (arXiv:2405.21060)."""
