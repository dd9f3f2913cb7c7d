"""The control socket of a live run: look at it, and change it, from outside."""
