"""The prefix cache: what was computed once is found again by its tokens, on the device, in host memory or on disk"""
