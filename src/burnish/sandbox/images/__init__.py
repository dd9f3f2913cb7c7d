"""Root filesystems for boxes: kept once by content, found by name.

    base.py         the contract: what pools know of images
    store.py        ImageStore: add, resolve, lease, list, verify, remove
    repository.py   the directory that they live in: staging, locks, trees, names, sweep
    manifest.py     records that the store writes
    unpacking.py    a directory or plain tar -> a tree
    oci.py          an OCI layout or archive -> a tree and its settings
    layout.py       blobs of an OCI layout, each checked against its digest
    debootstrap.py  a suite of Debian or Ubuntu -> a tar

Adding copies: a box's lower directory must not change while it is mounted, and a digest of what
others can change would be a lie. What an image may not bring along is dropped or refused on the way
in: devices, pipes and sockets are dropped (every box has its own /dev), set-id bits and all but
`user.*` attributes removed, those of overlayfs too; names that lead out, forged whiteouts and bombs
are refused.

As root files keep the owners that the archive gives (the native backend maps them into the box);
for an ordinary user everything belongs to that user, and is at least readable by them.
"""
