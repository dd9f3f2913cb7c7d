"""Keys and values of running sequences: where they are kept, and attention over them."""
