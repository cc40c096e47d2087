"""Measurements that need a real accelerator."""
