"""Scheduling: admission of waiting requests, prefills in progress, and decode steps beside them"""
