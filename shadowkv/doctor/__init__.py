"""``shadowkv doctor``: the backend of every op on this machine, why no faster one is used, and how to change that."""
