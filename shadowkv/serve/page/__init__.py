"""The chat page at ``/``: ask questions about long documents and see which passages the answer used."""
