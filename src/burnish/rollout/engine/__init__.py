"""Inference in process: continuous batching over a paged cache."""
