"""Policies: which gates a run must pass, and with what limits."""
