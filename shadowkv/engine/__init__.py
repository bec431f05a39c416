"""The engine: requests, scheduling, execution and sampling

``engine.py`` runs the steps. ``llm.py`` calls it offline, and ``process`` calls it for servers. ``scheduling`` chooses
what a step computes, and ``execution`` computes it.
"""
