"""Storage of files, responses and batches for clients, separate for each API key."""
