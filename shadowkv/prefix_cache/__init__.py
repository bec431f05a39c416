"""The prefix cache: finds keys and values of earlier prompts by their tokens, on the device, in host memory or on disk

Engines use ``prefix_cache.py``, which finds prompts in a radix tree (``tree.py``). ``lower_tiers.py`` manages copies of
the tree's nodes below the device, in host memory (``host.py``) and on ``disk``. If these tiers fail, the cache goes on
without them.
"""
