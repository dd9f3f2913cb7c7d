"""Frozen file states of boxes: which layers are alive, and layers as tar archives.

    layers.py   pure bookkeeping: holds on stacks of layers, what to drop, when to squash
    export.py   export_layers(layer_fds, destination, uid_base) -> digest: one OCI layer tar
                digest(layer_fds, uid_base) -> digest of what the layers show, without a tar
    imports.py  import_tar(source, into_fd, uid_base): tar of any origin -> one layer
    squash.py   squash(layer_fds, into_fd): several layers -> one layer
    worker.py   NamespaceWorker(namespace_fd): the same three for owners that are not root

A layer is the upper directory of an overlay mounted with `userxattr`, given as a descriptor. All
that it holds was written by hostile code: nothing in it is opened through a link.
"""
