"""Operations on rows of activations: RMSNorm, gated activations, and quantization to 8-bit floats."""
