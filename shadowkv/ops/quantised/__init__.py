"""Rows of quantised numbers: the forms that they are stored in, as matrices, ops and files of weights share them."""
