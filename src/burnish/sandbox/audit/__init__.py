"""A hash-chained log of what was done with every box.

    AuditedPool(pool, directory)    pool.py     wraps any backend
        AuditedBox                  box.py      one line before a command starts, one when it ended
        AuditedWarmBox              warm_box.py  a Python job is logged as a command
            BoxLog                  log.py      appends; one file per box
            AuditLogs               logs.py     the directory; takes decisions of a proxy too
                Line, events        events.py   what a line says, and its one way to be written
    heads.jsonl                     heads.py    hashes to keep elsewhere: what makes cuts visible
    read, verify                    verify.py   one log
    verify_all, verify_one          directory.py  with the others and with heads

The chain shows edits, deletions and reordering. Who can write the files can also write a whole new
chain, or cut the end off; the heads show that, so keep them where the owner of the boxes cannot
write (`AuditLogs(heads=...)`).
"""

from burnish.sandbox.audit.directory import verify_all, verify_one
from burnish.sandbox.audit.logs import AuditLogs
from burnish.sandbox.audit.pool import AuditedPool
from burnish.sandbox.audit.verify import Report, read, verify

__all__ = ["AuditLogs", "AuditedPool", "Report", "read", "verify", "verify_all", "verify_one"]
