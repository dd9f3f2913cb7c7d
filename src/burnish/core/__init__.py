"""Layer 0: the records, vocabularies, errors and protocols that every other part speaks."""
