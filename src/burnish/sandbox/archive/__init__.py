"""Trees of files that nobody vouches for: read, written, compared, archived.

    compression.py  a tar file -> its plain stream
    tar_reader.py   stream -> entries; bounded, strict, no file system
    tar_writer.py   entries -> stream; same tree, same bytes
    beneath.py      descriptors below a directory: `openat2`, never a path string of the host
    tree_writer.py  entries -> files below a descriptor
    walk.py         one directory, or overlay layers merged -> nodes in one fixed order
    digest.py       nodes -> one digest of what a tree shows
    removal.py      a tree -> nothing, however deep

`state` keeps layers of boxes with these, `images` root filesystems.
"""
