"""Operations on rows of activations: RMSNorm, gated activations, and quantisation to 8-bit floats."""
