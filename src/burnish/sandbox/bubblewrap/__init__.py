"""Boxes by bubblewrap, for machines on which the native helper cannot run.

pool.py --socket--> keeper.py (the keeper package: own process, own mounts)
|-- inspection.py  what this host offers; one box is tried
'-- box.py         a box, and what it may see
'-- launch.py  one bubblewrap for one command, started ahead
argv.py  its command line
"""
