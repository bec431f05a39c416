"""``shadowkv bench``: benchmarks of this server or other servers, measured by a client."""
