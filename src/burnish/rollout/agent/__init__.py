"""The turn loop: tokens in, tokens out."""
