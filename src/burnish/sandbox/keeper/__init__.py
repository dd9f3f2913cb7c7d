"""The process that owns all boxes of a pool, for backends that start a process for each command.

    pool.py -- client.py --socket, protocol.py--> keeper.py (own process, own mount namespace)
                                                     '-- stored_box.py  storage, groups, one lock
                                                            |-- namespace.py  sized tmpfs, mounts
                                                            '-- process.py    watches one command
                                                                   |-- pipes.py     its output
                                                                   |-- attacher.py  into groups
                                                                   '-- children.py  ended, reaped

A backend brings a `StoredBox` that knows how to start its process, a `BoxMaker`, and the module
with `main` that a `KeeperClient` runs (`bubblewrap.keeper`, `oci.keeper`).
"""
