"""Layer 3: isolated execution of model-written code.

    start.py: config -> pool   native/                one helper and one init per box
                               bubblewrap/, oci/      one process or container per command,
                                 '-- keeper/          owned by one process per pool
                               remote/                any of them, served over HTTP
    shared by backends: seccomp.py (what a box may call), limits.py + cgroup.py (what it may use),
    files.py (reads and writes beneath it), outcome.py (how a command ended)
    around a box: images/ state/ archive/ (its files), network/, session/, audit/, pooling/

The threat is hostile code that wants to read the host, reach a network, outlive its command, starve
its neighbours or forge a result. Namespaces share the host kernel: a kernel bug is a way out. Run
truly hostile code on a machine without secrets, itself a virtual machine.
"""
