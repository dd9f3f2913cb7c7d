import itertools
import os
import subprocess
import sys

import pytest

from burnish.run.jobs.demand import Demand

SPINS = "while True: pass"
SAYS_AND_SLEEPS = "import signal; print('ready', flush=True); signal.pause()"


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="no figures of threads")
def test_a_process_that_computes_demands_and_one_that_sleeps_does_not():
    computing = subprocess.Popen([sys.executable, "-c", SPINS])
    asleep = subprocess.Popen(
        [sys.executable, "-c", SAYS_AND_SLEEPS], stdout=subprocess.PIPE, text=True
    )
    try:
        assert asleep.stdout is not None
        assert asleep.stdout.readline()
        busy, idle = Demand(computing.pid, 0.0), Demand(asleep.pid, 0.0)
        # A look is a second by this clock, so the sum is in seconds of the processor.
        used = 0.0
        for look in itertools.count(1):
            used += busy.since(float(look))
            if used >= 0.5:
                break
        assert idle.since(1.0) < 0.1
    finally:
        for process in (computing, asleep):
            process.kill()
            process.communicate()


def test_a_process_that_is_gone_demands_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert Demand(process.pid, 0.0).since(1.0) == 0.0
