"""The prefix cache: what was computed once is found again by its tokens, on the device, in host memory or on disk

``cache.py`` is what an engine uses. It finds prompts in the tree (``tree.py``). ``lower_tiers.py`` has everything below
the device: copies of the tree's nodes in host memory (``host.py``) and on ``disk``. Where that fails, the cache goes on
without it.
"""
