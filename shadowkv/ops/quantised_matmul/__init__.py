"""Matrix products with quantised weights, which stay as a model's files store them, and rows of these as float32."""
