"""The page at ``/``, to watch long contexts at work."""
