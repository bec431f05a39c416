"""Benchmarks of other engines. Their results have the columns of the sweeps' files."""
