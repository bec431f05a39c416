"""MiniMax's families."""
