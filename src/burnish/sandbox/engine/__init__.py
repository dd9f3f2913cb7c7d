"""Boxes through the daemon of docker, for who may talk to it and to nothing else.

    pool.py --socket--> keeper.py (the keeper package: own process, no namespace of its own)
                           |-- host.py      one box is tried; images.py gives the daemon its images
                           |-- guard.py     a shell that removes everything when the keeper is dead
                           '-- box.py       one box
                                 |-- storage.py  --socket--> storekeeper.py, in a container
                                 '-- launch.py   one container for one command, started ahead
                                       counting.py   what its control groups counted
    client.py    the command line of docker
    options.py   what a container may do (podman's too)

One container for each command, as with an OCI runtime: its end is the end of every process of the
command. Files of the box lie in a volume in memory, which one more container, without a program of
anybody's, holds, sizes and hands to us as open directories.
"""
