"""An engine in its own process: ``core.py`` serves it there, ``client.py`` calls it from the serving processes

``messages.py`` has the messages between them. ``launch.py`` starts the process, whose main module is ``main.py``.
"""
