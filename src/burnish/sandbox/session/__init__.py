"""State that outlives commands: a shell, and a Python interpreter, in a box.

Both run as jobs of the box do, and what they hold lies in the box: a hostile job can damage its own
session and nothing else, and what comes back is checked like everything that comes out of a box.

    shell.py    ShellSession: directory, variables, functions, aliases, options
    kernel.py   PythonKernel: a namespace, with checkpoints by fork; needs `Feature.BACKGROUND`
    criu.py     whether whole process trees can be saved here
"""
