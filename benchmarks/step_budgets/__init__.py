"""Whether an error bound, and not a fixed number, should say how many tokens a decode step reads"""
