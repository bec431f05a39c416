"""The prefix cache: what was computed once is found again by its tokens"""
