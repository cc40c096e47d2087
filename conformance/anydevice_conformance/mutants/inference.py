"""Faults that show in whole jobs."""
