"""Matrix products with rows of quantised numbers, kept as the files of a model store them."""
