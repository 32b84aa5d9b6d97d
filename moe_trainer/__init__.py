"""A small, readable reference trainer for mixture-of-experts language models."""
