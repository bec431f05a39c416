"""The engine: requests, scheduling, execution and sampling

``engine.py`` runs the steps. ``llm.py`` calls it offline, ``process`` for servers. ``scheduling`` chooses what a step
computes, and ``execution`` computes it.
"""
