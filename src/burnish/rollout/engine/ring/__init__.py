"""One long prompt computed by several processes (context parallelism)."""
