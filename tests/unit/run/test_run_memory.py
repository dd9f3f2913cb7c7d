import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from burnish.run.memory import share_one_heap
if sys.argv[1] == "shared":
    assert share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
gate = threading.Barrier(5)
def work():
    libc.malloc(1000)
    gate.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
gate.wait()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fflush(file)
"""


def arenas(how):
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    ).stdout
    return out.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="arenas are glibc's")
def test_all_threads_use_one_heap_when_asked_to():
    if arenas("own") < 2:
        pytest.skip("this C library has no arenas per thread")
    assert arenas("shared") == 1
