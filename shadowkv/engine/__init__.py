"""Scheduler, runner and sampling

``engine.py`` takes the steps; ``llm.py`` and ``process`` drive them, offline and for servers. ``scheduling`` says what
is computed next, ``execution`` computes it.
"""
