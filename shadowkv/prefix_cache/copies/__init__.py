"""Copies below the device, in host memory and on disk: made, evicted, brought back"""
