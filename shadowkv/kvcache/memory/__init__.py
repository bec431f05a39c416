"""Memory: arenas of blocks, the store of compressed pages, free memory of the machine, and side streams"""
