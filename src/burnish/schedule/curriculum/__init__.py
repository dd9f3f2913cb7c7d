"""Which items of a domain: tiers of difficulty, mastered items, group sizes, filters."""
