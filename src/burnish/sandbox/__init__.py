"""Layer 3: isolated execution of model-written code.

    caller -- pool.py --socket--> keeper.py (own process, own mount namespace)
                                     |-- namespace.py  one size-limited tmpfs per box
                                     |-- files.py      host-side reads and writes beneath it
                                     '-- process.py    one bubblewrap per command
                                            argv.py + seccomp.py   what it may see and call
                                            limits.py + cgroup.py  what it may use
                                            outcome.py             how it ended

The threat is hostile code that wants to read the host, reach a network, outlive its command, starve
its neighbours or forge a result. Namespaces share the host kernel: a kernel bug is a way out. Run
truly hostile code on a machine without secrets, itself a virtual machine.
"""
