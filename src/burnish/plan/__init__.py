"""Capacity and what-if: simulators that drive the real policies."""
