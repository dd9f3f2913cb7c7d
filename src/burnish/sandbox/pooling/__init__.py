"""Decisions of a pool as pure state machines: no I/O, no clock of their own, no locks.

    acquire --> FairQueue --grant--> warm box, or start one
                    ^                     ^
                 release             WarmTargets: how many to keep ready

Callers pass `now_s` (monotonic seconds) and serialise calls: one event loop, or a lock.
"""
