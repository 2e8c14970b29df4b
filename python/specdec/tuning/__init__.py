"""Measurements that choose settings for the machine at hand."""
