"""What is on the device: the tree of cached prefixes, which sequences have them, and what a prompt finds there"""
