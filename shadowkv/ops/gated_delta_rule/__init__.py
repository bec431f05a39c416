"""The gated delta rule: linear attention whose state forgets and corrects itself (Gated DeltaNet, arXiv:2412.06464)."""
