"""Boxes by bubblewrap, for machines on which the native helper cannot run.

caller -- pool.py --socket--> keeper.py (own process, own mount namespace)
|-- namespace.py  one size-limited tmpfs per box
'-- process.py    one bubblewrap per command
argv.py    what it may see
"""
