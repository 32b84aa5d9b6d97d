"""Exact counts of a router, judged window by window."""
