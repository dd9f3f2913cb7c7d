"""A daemon that lets several runs share this machine."""
