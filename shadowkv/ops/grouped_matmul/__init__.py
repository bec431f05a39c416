"""Products of rows with matrices of experts, each row with its own expert's."""
