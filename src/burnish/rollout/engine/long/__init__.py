"""Contexts longer than memory or time allow: which keys are attended, kept, and where."""
