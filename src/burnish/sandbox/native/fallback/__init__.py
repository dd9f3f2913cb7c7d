"""The native sandbox's helper in Python, for machines without a compiler; and warm Python.

Run as a directory, on Python 3.8 or later, with nothing but the standard library:

    python3 -I -S -B <directory> FD
        The helper of `protocol` on the SEQPACKET socket FD: what the C helper does, slower.

    python3 -I -S -B <directory> --zygote FILE FD
        Answers HELLO as above, and then becomes the C helper in FILE.

    python3 -I -S -B <directory> --template INTERPRETER site|no-site PATH:PATH MODULE... FD
        The same protocol on FD, but boxes are forks of INTERPRETER, a path in the image, which has
        searched PATHs (and site packages, with `site`) for the MODULEs and imported them. Their
        inits take PYTHON. READY comes after the imports; ERROR ENOENT says which one failed.
        `pid` in CREATED counts in the template's pid namespace: use the pidfd.
"""
