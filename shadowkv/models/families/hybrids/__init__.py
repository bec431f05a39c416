"""Hybrids: families with linear attention in most layers."""
