"""Reports on predictions: statistics, tables and plots."""
