"""What is made of answers: statistics, tables and plots."""
