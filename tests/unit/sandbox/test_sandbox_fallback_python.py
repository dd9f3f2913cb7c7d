"""Warm Python jobs: what they share with plain Python, and what they must not share with others."""

import ast
import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from raw_helper import COMMANDS, FALLBACK, NUM_IDS, PATH, RawBox, RawHelper, job_body, memory_file

from burnish.sandbox.interpreter import find_python
from burnish.sandbox.native import protocol
from burnish.sandbox.native.protocol import Ending, Op, PythonKind, PythonOption

ROOT = os.geteuid() == 0
PYTHON = find_python() or "python3"
MODULES = ("random", "uuid", "ssl", "hashlib", "tempfile", "json", "logging", "threading")


class Outcome(NamedTuple):
    ending: Ending
    code: int
    stdout: bytes
    stderr: bytes


def open_template(
    modules: Sequence[str] = MODULES, paths: str = "", interpreter: str = PYTHON, **options: object
) -> RawHelper:
    options.setdefault("num_ids", NUM_IDS if ROOT else 1)
    command = (*COMMANDS["python"], "--template", interpreter, "no-site", paths, *modules)
    return RawHelper(command, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def template() -> Iterator[RawHelper]:
    helper = open_template()
    if helper.ready.op is Op.ERROR:
        helper.end()
        pytest.skip(f"no warm Python here: {helper.ready.stage}")
    yield helper
    assert helper.end() == (0, "")


@pytest.fixture
def box(template: RawHelper) -> Iterator[RawBox]:
    made = template.create()
    yield made
    destroy(template, made)


def destroy(template: RawHelper, box: RawBox) -> None:
    assert template.tell(Op.DESTROY, box.number).op is Op.DONE
    template.boxes.remove(box)
    box.close()


def python(
    box: RawBox,
    source: str | bytes,
    *argv: str,
    kind: PythonKind = PythonKind.CODE,
    options: int = 0,
    stdin: bytes = b"",
    wall_us: int = 30_000_000,
    env: Sequence[str] = (PATH, "HOME=/work", "LANG=C.UTF-8"),
    limits: Sequence[tuple[int, int, int]] = (),
    flags: int = 0,
) -> Outcome:
    detail = kind | options << 32
    body = job_body(
        box.job_id, argv, detail=detail, wall_us=wall_us, files=[source], env=env, limits=limits
    )
    files = [memory_file(stdin), memory_file(), memory_file()]
    try:
        if len(body) > 100_000:
            files.append(memory_file(body))
            box.send(Op.PYTHON, b"", files, flags | protocol.Flag.EXEC_IN_FILE)
        else:
            box.send(Op.PYTHON, body, files, flags)
        exited = box.exited()
        out, err = (os.pread(file, 1 << 26, 0) for file in files[1:3])
        return Outcome(exited.ending, exited.code, out, err)
    finally:
        for file in files:
            os.close(file)


def printed(box: RawBox, code: str, **options: object) -> str:
    outcome = python(box, code, **options)  # type: ignore[arg-type]
    assert (outcome.ending, outcome.code) == (Ending.EXITED, 0), outcome
    return outcome.stdout.decode()


# As plain Python

PROGRAMS = {
    "nothing": "",
    "print": "print('a', 'b', sep='-')",
    "unicode": "print('\\u00e4\\u6f22\\U0001f600', flush=True)",
    "argv": "import sys; print(sys.argv)",
    "path": "import sys; print(sys.path)",
    "name": "print(__name__, __doc__, __package__, __spec__, __builtins__)",
    "globals": "print(sorted(globals()))",
    "exit 3": "import sys; sys.exit(3)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit 256": "import sys; sys.exit(256)",
    "exit None": "import sys; print('x'); sys.exit()",
    "exit text": "print('out'); raise SystemExit('why')",
    "exit list": "raise SystemExit([1, 2])",
    "os._exit": "import os; print('lost', end=''); os._exit(7)",
    "exception": "def f():\n    1 / 0\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('b') from e",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('b')",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError('x')])",
    "syntax": "x = )\n",
    "indent": "if 1:\nprint(2)",
    "base": "raise BaseException('b')",
    "generator": "raise GeneratorExit",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\n1 / 0",
    "bad hook": "import sys\nsys.excepthook = 3\n1 / 0",
    "stdout then error": "print('first')\nraise KeyError('k')",
    "input": "print(input(), input())",
    "eof": "input()",
    "stdin": "import sys; print(len(sys.stdin.buffer.read()))",
    "stdio": "import sys; print(sys.stdin, sys.stdout, sys.stderr, sys.stdout.line_buffering)",
    "dunder stdio": "import sys; print(sys.stdout is sys.__stdout__, sys.stdin is sys.__stdin__)",
    "closed stdout": "import sys; print('x'); sys.stdout.close()",
    "atexit": "import atexit; atexit.register(print, 'end'); print('start')",
    "atexit exit": "import atexit, sys; atexit.register(lambda: sys.exit(5)); print('start')",
    "thread interrupts": "import _thread, time\n_thread.interrupt_main()\ntime.sleep(1)",
    "exception that cannot be shown": "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
    "hook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0",
    "main is gone": "import sys\ndel sys.modules['__main__']\nprint(1)",
    "destructor that fails": "class C:\n    def __del__(self): 1 / 0\nc = C()",
    "atexit error": "import atexit; atexit.register(lambda: 1 / 0); print('start')",
    "thread": "import threading, time\ndef f():\n    time.sleep(.05); print('t')\n"
    "threading.Thread(target=f).start(); print('m')",
    "daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True)"
    ".start(); print('m')",
    "thread error": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\n"
    "t.start(); t.join(); print('m')",
    "destructor": "class C:\n    def __del__(self): print('del')\nc = C(); print('end')",
    "destructor of a cycle": "class C:\n    def __del__(self): print('del')\n"
    "c = C(); c.me = c; del c; print('end')",
    "unclosed file": "f = open('/tmp/x', 'w'); f.write('abc')",
    "annotations": "x: int = 1; print(__annotations__)",
    "no future of ours": "def f(x: int): pass\nprint(f.__annotations__)",
    "warning": "import warnings; warnings.warn('w')",
    "signals": "import signal\nprint([signal.getsignal(n) for n in (2, 13, 15, 17, 25)])",
    "mask": "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError as e:\n    print(e)",
    "subprocess": "import subprocess, sys\n"
    "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)",
    "environment": "import os; print(sorted(os.environ.items()))",
    "lines": "import sys\nfor line in sys.stdin: print(repr(line))",
    "gc": "import gc; print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() >= 0)",
    "threads": "import threading; print(threading.main_thread() is threading.current_thread())",
    "executable": "import sys; print(sys.executable, sys.orig_argv[1:])",
    "main": "import __main__; print(__main__.__dict__ is globals())",
    "pickle": "import pickle\nclass C: pass\nprint(pickle.dumps(C())[:30])",
    "no stderr": "import sys; sys.stderr = None; 1 / 0",
    "no stdout": "import sys; sys.stdout = None; print('x')",
    "huge output": "print('x' * 5_000_000)",
    "nul": "print('a\\0b')",
    "surrogate": "import sys; sys.stdout.buffer.write(b'\\xff'); print('\\udcff')",
}


def unaddressed(output: bytes) -> bytes:
    return re.sub(rb"0x[0-9a-f]+", b"0x", output)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A suite in the background of a shell ignores interrupts, and so would its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.usefixtures("interruptible")
def test_a_job_does_what_plain_python_does(box: RawBox, code: str) -> None:
    given = b"one line\r\nand \xc3\xa4nother\n"
    mine = python(box, code, "x", "\u00e4", stdin=given)
    # The plain one has its work directory elsewhere, and a process id and user of its own.
    environment = {"PATH": PATH[5:], "HOME": "/work", "LANG": "C.UTF-8"}
    run = [PYTHON, "-S", "-s", "-B", "-c", code, "x", "\u00e4"]
    plain = subprocess.run(run, input=given, capture_output=True, env=environment, cwd="/")
    shown = mine.stdout
    if code == PROGRAMS["executable"]:
        shown = shown.replace(b"['-c'", b"['-S', '-s', '-B', '-c'")
    assert (shown, unaddressed(mine.stderr)) == (plain.stdout, unaddressed(plain.stderr))
    code_or_signal = -mine.code if mine.ending is Ending.SIGNALED else mine.code
    assert code_or_signal == plain.returncode


def both(box: RawBox, tmp_path: Path, kind: PythonKind, *argv: str) -> None:
    """Run from equal directories, and compare; paths in the output are made equal."""
    mine = python(box, argv[0], *argv[1:], kind=kind)
    flag = ["-m"] if kind is PythonKind.MODULE else []
    environment = {"PATH": PATH[5:], "HOME": "/work", "LANG": "C.UTF-8"}
    run = [PYTHON, "-S", "-s", "-B", *flag, *argv]
    plain = subprocess.run(run, capture_output=True, env=environment, cwd=tmp_path)
    seen = [text.replace(os.fsencode(tmp_path), b"/work") for text in (plain.stdout, plain.stderr)]
    assert (mine.code, mine.stdout, mine.stderr) == (plain.returncode, *seen)


SCRIPTS = {
    "main.py": "import sys, near\n"
    "print(sys.argv, sys.path[0], __file__, __name__, near.x, __spec__)",
    "near.py": "x = 5",
    "bad.py": "def f():\n    raise ValueError('x')\n\nf()\n",
    "syntax.py": "a = 1\nb = (\n",
    "latin.py": "# -*- coding: latin-1 -*-\nprint('\xe4')",
    "package/__init__.py": "",
    "package/__main__.py": "import sys; print(sys.argv, __package__, __name__, __spec__.name)",
    "package/part.py": "from . import __main__ as m\nprint(__name__, __package__)",
    "folder/__main__.py": "import sys; print(sys.argv, sys.path[0], __name__)\n1 / 0",
}


@pytest.fixture
def scripts(box: RawBox, tmp_path: Path) -> Path:
    for name, source in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(source.encode("latin-1"))
        assert box.put(name, source.encode("latin-1")) == 0
    return tmp_path


@pytest.mark.parametrize(
    "path", ["main.py", "bad.py", "syntax.py", "latin.py", "folder", "missing.py", "package"]
)
def test_a_script_does_what_it_does_with_plain_python(
    box: RawBox, scripts: Path, path: str
) -> None:
    both(box, scripts, PythonKind.SCRIPT, path, "a", "b")


@pytest.mark.parametrize(
    "name", ["near", "package", "package.part", "bad", "missing", "package.missing", "json.tool"]
)
def test_a_module_does_what_it_does_with_plain_python(
    box: RawBox, scripts: Path, name: str
) -> None:
    both(box, scripts, PythonKind.MODULE, name, "--a")


def test_isolated_jobs_search_neither_their_directory_nor_the_path_variable(box: RawBox) -> None:
    box.put("near.py", b"")
    code = (
        "import sys; print('' in sys.path, '/work' in sys.path)\n"
        "try:\n import near\nexcept ImportError: print('no')"
    )
    env = (PATH, "PYTHONPATH=/work")
    assert printed(box, code, env=env, options=PythonOption.ISOLATED) == "False False\nno\n"
    assert printed(box, code, env=env) == "True True\n"


def test_modules_are_there_before_the_job(box: RawBox) -> None:
    assert printed(
        box, f"import sys; print({MODULES!r}[0] in sys.modules, 'csv' in sys.modules)"
    ) == ("True False\n")


def test_nothing_of_ours_can_be_seen_in_the_modules(box: RawBox) -> None:
    code = "import sys; print([n for n in sys.modules if 'burnish' in n or n == 'protocol'])"
    assert printed(box, code) == "[]\n"


def test_the_time_zone_of_the_environment_holds(box: RawBox) -> None:
    code = "import time; print(time.tzname[0], time.localtime(0).tm_hour)"
    assert printed(box, code, env=(PATH, "TZ=XST-5")) == "XST 5\n"


def test_unbuffered_output_comes_at_once(box: RawBox) -> None:
    code = "import os; print('seen', end=''); os._exit(0)"
    assert printed(box, code, env=(PATH, "PYTHONUNBUFFERED=1")) == "seen"
    assert printed(box, code) == ""


def test_long_programs_and_many_arguments_pass(box: RawBox) -> None:
    padding = "#" * 300_000
    words = [f"w{number}" for number in range(20_000)]
    outcome = python(box, f"import sys; print(len(sys.argv))\n{padding}", *words)
    assert outcome.stdout == b"20001\n"


# Nothing is shared

RANDOM = {
    "random": "import random; print(random.random(), random.getrandbits(64))",
    "an instance of the template": "import tempfile as t; print(next(t._get_candidate_names()))",
    "uuid4": "import uuid; print(uuid.uuid4())",
    "uuid1": "import uuid; print(uuid.uuid1())",
    "urandom": "import os; print(os.urandom(16))",
    "secrets": "import secrets; print(secrets.token_hex())",
    "ssl": "import ssl; print(ssl.RAND_bytes(16))",
    "tempfile": "import tempfile; print(tempfile.mktemp())",
    "SystemRandom": "import random; print(random.SystemRandom().random())",
}


@pytest.mark.parametrize("code", RANDOM.values(), ids=RANDOM)
def test_no_two_jobs_draw_the_same(template: RawHelper, code: str) -> None:
    seen = []
    for _ in range(2):
        box = template.create()
        seen += [printed(box, code) for _ in range(3)]
        destroy(template, box)
    assert len(set(seen)) == 6


def test_generators_that_were_used_before_the_fork_are_new_too(tmp_path: Path) -> None:
    """OpenSSL fills its state at the first draw; `random` has one from the import on."""
    helper = open_template(
        ("drawn",),
        paths="/opt/drawn",
        files=[
            (
                "/opt/drawn/drawn.py",
                (
                    "import random, ssl, uuid, tempfile\n"
                    "random.random(); ssl.RAND_bytes(8); uuid.uuid1(); tempfile.mktemp()\n"
                ),
            )
        ],
    )
    assert helper.ready.op is Op.READY, helper.ready.stage
    code = "import random, ssl\nprint(random.random(), ssl.RAND_bytes(8).hex())"
    drawn = []
    for _ in range(2):
        box = helper.create()
        drawn += [printed(box, code).split(" ") for _ in range(2)]
    assert len({values[0] for values in drawn}) == 4
    assert len({values[1] for values in drawn}) == 4
    helper.end()


def test_numpys_own_generator_is_another_in_each_job() -> None:
    """Its state is the template's, which knows of no fork."""
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        pytest.skip("needs numpy")
    site = str(Path(numpy.origin).parents[1])
    helper = open_template(("numpy.random",), paths="/opt/site", binds=[(site, "/opt/site")])
    try:
        if helper.ready.op is Op.ERROR:
            pytest.skip(f"the system's python3 cannot import our numpy: {helper.ready.stage}")
        drawn = []
        for _ in range(2):
            box = helper.create()
            drawn += [printed(box, "import numpy; print(numpy.random.random())") for _ in "ab"]
            destroy(helper, box)
        assert len(set(drawn)) == 4
    finally:
        helper.end()


def test_what_a_job_does_to_its_interpreter_ends_with_it(box: RawBox) -> None:
    spoil = (
        "import sys, os, builtins, json, random, threading\n"
        "builtins.print = None; json.loads = None; sys.path.clear(); sys.modules.clear()\n"
        "os.environ['SPOILT'] = '1'; os.chdir('/'); os.umask(0); sys.stdout = None\n"
        "random.seed(1)\n"
        "sys.setrecursionlimit(50)"
    )
    python(box, spoil)
    code = (
        "import json, os, sys\n"
        "print(json.loads('[1]'), os.getcwd(), 'SPOILT' in os.environ, sys.getrecursionlimit())"
    )
    assert printed(box, code) == "[1] /work False 1000\n"


def test_jobs_share_the_hash_seed_of_the_template(box: RawBox) -> None:
    code = "print(hash('a'))"
    seeds = {printed(box, code), printed(box, code, env=(PATH, "PYTHONHASHSEED=5"))}
    plain = subprocess.run(
        [PYTHON, "-c", code], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True
    )
    assert seeds == {plain.stdout}


# Isolation


def test_a_job_has_no_right_and_no_descriptor(box: RawBox) -> None:
    code = (
        "import os\n"
        "for line in open('/proc/self/status'):\n"
        "    if line.startswith(('Uid', 'Gid', 'Cap', 'NoNew', 'Seccomp:')): print(line.split())\n"
        "print(sorted(os.listdir('/proc/self/fd')))"
    )
    user = str(box.job_id)
    lines = [ast.literal_eval(line) for line in printed(box, code).splitlines()]
    assert lines[0] == ["Uid:", *[user] * 4]
    assert lines[1] == ["Gid:", *[user] * 4]
    zeros = "0" * 16
    caps = [f"Cap{name}:" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    assert [line for line in lines if str(line[0]).startswith("Cap")] == [[c, zeros] for c in caps]
    assert ["NoNewPrivs:", "1"] in lines
    assert ["Seccomp:", "2"] in lines
    # The fourth is the directory that is being read.
    assert lines[-1] == ["0", "1", "2", "3"]


def test_the_first_process_can_neither_be_killed_nor_read(box: RawBox) -> None:
    code = (
        "import os, signal, ctypes\n"
        "for n in (9, 15, 19, 17, 11):\n"
        "    try: os.kill(1, n); print('sent', n)\n"
        "    except PermissionError: pass\n"
        "for name in ('mem', 'maps', 'environ', 'exe', 'fd', 'cwd', 'root', 'stack'):\n"
        "    path = '/proc/1/' + name\n"
        "    try:\n"
        "        if name in ('exe', 'cwd', 'root'): os.readlink(path)\n"
        "        elif name == 'fd': os.listdir(path)\n"
        "        else: open(path, 'rb').read(10)\n"
        "        print('read', name)\n"
        "    except OSError: pass\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.ptrace(16, 1, 0, 0), libc.process_vm_readv(1, 0, 0, 0, 0, 0))\n"
        "try: os.kill(-1, 9)\n"
        "except OSError: pass\n"
    )
    shown = python(box, code).stdout.decode()
    if ROOT:
        assert shown == "-1 -1\n"
    assert printed(box, "print('alive')") == "alive\n"


def test_jobs_and_commands_share_the_box(box: RawBox) -> None:
    printed(box, "open('/work/a', 'w').write('from python')")
    assert box.output("cat", "a") == "from python"
    box.exec("sh", "-c", "echo from sh > b")
    assert printed(box, "print(open('b').read())") == "from sh\n\n"


def test_a_job_ends_with_its_time(box: RawBox) -> None:
    outcome = python(box, "print('begun', flush=True)\nwhile True: pass", wall_us=300_000)
    assert (outcome.ending, outcome.stdout) == (Ending.TIMEOUT, b"begun\n")
    stopped = python(box, "import os, signal; os.kill(0, signal.SIGSTOP)", wall_us=300_000)
    assert stopped.ending is Ending.TIMEOUT


def test_what_a_job_leaves_behind_ends_with_it(box: RawBox) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1000)"
    python(box, code)
    shown = printed(box, "import os; print(len([n for n in os.listdir('/proc') if n.isdigit()]))")
    assert shown == "2\n"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_death_by_a_signal_is_told(box: RawBox, number: int) -> None:
    outcome = python(box, f"import os; os.kill(os.getpid(), {int(number)})")
    assert (outcome.ending, outcome.code) == (Ending.SIGNALED, number)


def test_limits_hold(box: RawBox) -> None:
    room = 200 * 2**20
    code = "try:\n    x = bytearray(400 * 2**20)\nexcept MemoryError: print('limited')"
    outcome = python(box, code, limits=[(9, room, room)])  # RLIMIT_AS
    assert outcome.stdout == b"limited\n"
    spin = python(box, "while True: pass", limits=[(0, 1, 2)])  # RLIMIT_CPU
    assert (spin.ending, spin.code) == (Ending.SIGNALED, signal.SIGXCPU)
    files = python(box, "import resource; print(resource.getrlimit(7))", limits=[(7, 20, 20)])
    assert files.stdout == b"(20, 20)\n"


def test_no_number_is_too_large(box: RawBox) -> None:
    most = 2**64 - 1
    assert python(box, "print(1)", wall_us=most).stdout == b"1\n"
    assert python(box, "print(1)", limits=[(2**32 - 1, most, 5)]).ending is Ending.NOT_STARTED
    assert python(box, "print(1)", limits=[(7, most, most - 1)]).code in (0, errno.EINVAL)
    unknown = python(box, "print(1)", kind=7)  # type: ignore[arg-type]
    assert (unknown.ending, unknown.code) == (Ending.NOT_STARTED, errno.EINVAL)


def body_in(box: RawBox, folder: str) -> bytes:
    return job_body(box.job_id, cwd=folder, files=["print(1)"])


def test_a_directory_that_is_not_there_is_told(box: RawBox) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    box.send(Op.PYTHON, body_in(box, "/none"), [null] * 3)
    exited = box.exited()
    os.close(null)
    assert (exited.ending, exited.code) == (Ending.NOT_STARTED, errno.ENOENT)


def test_boxes_of_a_plain_helper_refuse_python() -> None:
    helper = RawHelper(COMMANDS["python"], num_ids=NUM_IDS if ROOT else 1)
    box = helper.create()
    null = os.open(os.devnull, os.O_RDWR)
    assert box.ask(Op.PYTHON, body_in(box, "/work"), [null] * 3).error == errno.ENOSYS
    os.close(null)
    helper.end()


# The template


def test_the_template_has_no_right_on_the_host(template: RawHelper) -> None:
    box = template.create()
    launcher = template.process.pid
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii")
    (child,) = children.split()
    status = Path(f"/proc/{child}/status").read_text(encoding="ascii")
    assert not ROOT or int(status.split("Uid:")[1].split()[0]) > 0
    for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
        assert os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{child}/ns/{name}")
    host = os.stat("/").st_dev
    opened = os.listdir(f"/proc/{child}/fd")
    assert not [fd for fd in opened if os.stat(f"/proc/{child}/fd/{fd}").st_dev == host]
    destroy(template, box)


def test_boxes_see_nothing_of_the_template(box: RawBox) -> None:
    assert printed(box, "import os; print('.burnish' in os.listdir('/'))") == "False\n"
    assert printed(box, "import os; print(os.listdir('/tmp'), os.listdir('/work'))") == "[] []\n"


@pytest.mark.parametrize("module", ["no_such_module", "broken"])
def test_a_module_that_cannot_be_imported_is_named(module: str) -> None:
    files = [("/opt/m/broken.py", "raise RuntimeError('own fault')")]
    helper = open_template(("json", module), paths="/opt/m", files=files)
    assert helper.ready.op is Op.ERROR
    assert module in helper.ready.stage
    helper.end()


def test_modules_that_start_threads_are_refused() -> None:
    source = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    )
    helper = open_template(("busy",), paths="/opt/m", files=[("/opt/m/busy.py", source)])
    assert helper.ready.op is Op.ERROR
    assert "threads" in helper.ready.stage
    helper.end()


def test_an_image_without_python_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "bin").mkdir()
    helper = open_template((), rootfs=str(tmp_path), interpreter="/bin/python3")
    assert helper.ready.op is Op.ERROR
    assert "/bin/python3" in helper.ready.stage
    helper.end()


def test_a_template_that_is_killed_takes_its_boxes_along(tmp_path: Path) -> None:
    helper = open_template(("json",))
    box = helper.create()
    launcher = helper.process.pid
    (child,) = Path(f"/proc/{launcher}/task/{launcher}/children").read_text("ascii").split()
    os.kill(int(child), signal.SIGKILL)
    assert box.receive() is None
    assert helper.process.wait(30) == 1


def test_pytest_runs_warm(tmp_path: Path) -> None:
    """The host's own pytest, shown to the box; needs the same Python there as here."""
    here = Path(pytest.__file__).parents[1]
    probe = [PYTHON, "-s", "-S", "-c", f"import sys; sys.path[:0] = [{str(here)!r}]; import pytest"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip(f"{PYTHON} cannot import the pytest of {sys.executable}")
    helper = open_template(
        ("pytest", "_pytest.assertion.rewrite"), paths="/opt/site", binds=[(str(here), "/opt/site")]
    )
    assert helper.ready.op is Op.READY, helper.ready.stage
    box = helper.create()
    box.put(
        "test_a.py", b"def test_good():\n    assert 1\n\ndef test_bad():\n    assert [1] == [2]\n"
    )
    outcome = python(
        box, "pytest", "-q", "-p", "no:cacheprovider", "test_a.py", kind=PythonKind.MODULE
    )
    assert outcome.code == 1, outcome
    assert b"1 failed, 1 passed" in outcome.stdout
    assert b"assert [1] == [2]" in outcome.stdout
    helper.end()


def test_the_package_parses_on_the_oldest_python_that_images_have() -> None:
    for path in [*FALLBACK.glob("*.py"), Path(protocol.__file__)]:
        ast.parse(path.read_text(encoding="ascii"), feature_version=(3, 8))
