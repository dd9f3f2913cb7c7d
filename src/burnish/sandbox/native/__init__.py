"""Boxes by our own helper: see `design/0005-native-sandbox.md`."""
