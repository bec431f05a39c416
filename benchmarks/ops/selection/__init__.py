"""Times of selections, and of the attention and the copies that need them."""
