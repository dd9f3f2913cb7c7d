"""Burnish: an open post-training platform for language models."""

__version__ = "0.1.0"
