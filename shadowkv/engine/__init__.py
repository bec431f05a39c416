"""Scheduler, runner and sampling."""
