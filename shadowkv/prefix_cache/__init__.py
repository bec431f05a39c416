"""The prefix cache: what was computed once is found again by its tokens, on the device, in host memory or on disk

``cache.py`` is what an engine uses. It finds prompts in the tree (``device``) and goes on without the tiers below where
they fail: ``lower_tiers.py``, which are ``copies`` of the tree's nodes in host memory and on ``disk``. ``named`` are
requests for what has a name, also from other servers.
"""
