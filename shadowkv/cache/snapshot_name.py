"""What names of snapshots look like: for those who read them of requests, without NumPy, too."""

LINK_BYTES = 20
"""Of a link in the chain that names are made of (``key.py``)."""

SNAPSHOT_NAME = f"[0-9a-f]{{{2 * LINK_BYTES}}}"
"""A regular expression."""
