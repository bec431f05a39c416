"""Policies: their fields, the model's shape, and the rules by which tokens get a state of their own"""
