"""Boxes in containers of an OCI runtime: crun, runc, podman, and gVisor as the strong tier.

    pool.py --socket--> keeper.py (the keeper package: own process, own mounts)
                           |-- host.py    what the runtime needs on this host; one box is tried
                           '-- box.py     storage and control groups of a box
                                 '-- launch.py   one container for one command, started ahead
                                       launcher.py   the shell that waits in it for the command
                                       bundle.py     spec.py + filter.py: config.json and a root
                                       runtime.py    command lines, and what each runtime lacks
    with CRIU, on runc:
        process_pool.py --> process_box.py  kept containers, saved and restored with the files
                               |-- checkpoint.py  CRIU, and where states lie
                               '-- kept.py        a container that stays, and one that came back

One container for each command, as with bubblewrap: the end of the container is the end of every
process of the command, and there is no server inside for hostile code to take over.
"""
