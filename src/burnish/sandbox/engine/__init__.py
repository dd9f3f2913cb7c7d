"""Boxes through a container engine."""
