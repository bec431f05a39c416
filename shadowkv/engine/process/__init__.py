"""An engine in a process of its own, and how others reach it: ``client.py`` there, ``core.py`` here, ``messages.py``
between them."""
