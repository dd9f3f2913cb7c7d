"""Keys and values beyond memory: pages on disk, read back before they are attended."""
