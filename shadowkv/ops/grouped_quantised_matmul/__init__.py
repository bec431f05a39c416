"""Products of rows with matrices of experts that are kept quantised, each row with its own expert's."""
