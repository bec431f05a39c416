"""Decode steps: planned on the host, attended on the device, with values fetched from the host"""
