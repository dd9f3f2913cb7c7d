"""Which part of the budget each domain gets: one interface, many rules."""
