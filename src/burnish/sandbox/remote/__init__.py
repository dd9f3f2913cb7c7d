"""Boxes on other machines, or in a process that outlives its callers: one pool served over HTTP.

    RemotePool -- wire.py == HTTP, MessagePack ==> server.py -- tenants.py --> any SandboxPool
    (client.py)   |                                 |-- jobs.py    each request runs once
    FleetPool     loop.py: one thread and           |-- leases.py  clients that vanish lose boxes
    (fleet.py)    loop for all callers              '-- serving.py sockets, TLS, shutdown

Every request that does something is a job with an id of the client's: sent again after a broken
connection it is found, never run twice. Answers that take long are polled for, so that a host that
is gone is noticed while a command runs. A token opens everything: who has it may use, see and
destroy all boxes of that server. `daemon.py` is the server of `burnish sandbox`.
"""
