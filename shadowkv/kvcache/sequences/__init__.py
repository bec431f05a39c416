"""Sequences: layouts of pages, the memory of a group of layers, page tables, and the lifetimes of sequences"""
