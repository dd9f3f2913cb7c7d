"""Guessing tokens cheaply and checking several of them in one forward."""
