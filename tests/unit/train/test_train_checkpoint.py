"""Checkpoints under a killed writer, a full disk and damaged files."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.core.disk import DiskFullError
from burnish.core.errors import UserError
from burnish.train import checkpoint
from burnish.train.checkpoint import CheckpointDamagedError

FILES = ("tensors.safetensors", "state.json", "manifest.json")


def write(directory: Path, step: int, value: float = 0.0, num: int = 100, keep: int | None = None):
    return checkpoint.save(
        directory,
        step=step,
        tensors={"a": torch.full((num,), value), "b": torch.arange(6).view(2, 3).T},
        scalars={"num_steps": step},
        payload={"ledger": {"trained": step}},
        keep=keep,
    )


def test_what_is_saved_is_what_is_loaded(tmp_path):
    path = write(tmp_path / "new" / "checkpoints", 7, 0.5)
    found = checkpoint.load(path)
    assert (found.step, found.scalars) == (7, {"num_steps": 7})
    assert found.payload == {"ledger": {"trained": 7}}
    assert torch.equal(found.tensors["a"], torch.full((100,), 0.5))
    assert torch.equal(found.tensors["b"], torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_latest_goes_by_number_not_by_name_or_time(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    for step in (100_000_000, 99_999_999, 3):
        write(tmp_path, step)
    assert checkpoint.latest(tmp_path).name == "step-100000000"


def test_pruning_keeps_the_newest(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step, keep=2)
    assert [checkpoint.step_of(p) for p in checkpoint.checkpoints(tmp_path)] == [4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 1, 1.0)
    path = write(tmp_path, 1, 2.0)
    assert checkpoint.load(path).tensors["a"][0] == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_flipped_byte_is_found_and_the_last_good_checkpoint_named(tmp_path, name, where, flip):
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    file = bad / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= flip
    file.write_bytes(data)
    with pytest.raises(UserError) as caught:
        checkpoint.load(bad)
    damaged = isinstance(caught.value, CheckpointDamagedError)
    # A flip in the manifest may also hit the digit of its version.
    assert (str(good) in str(caught.value)) if damaged else name == "manifest.json"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncate", "empty", "delete", "append"])
def test_torn_files_are_refused_in_one_line(tmp_path, name, damage):
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    file = bad / name
    data = file.read_bytes()
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes({"truncate": data[:-5], "empty": b"", "append": data + b"}"}[damage])
    with pytest.raises(CheckpointDamagedError) as caught:
        checkpoint.load(bad)
    assert str(bad) in str(caught.value)
    assert str(good) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_good_one_the_message_says_so(tmp_path):
    for step in (1, 2):
        (write(tmp_path, step) / "state.json").unlink()
    with pytest.raises(CheckpointDamagedError, match="no older checkpoint is whole"):
        checkpoint.load(tmp_path / "step-00000002")


def test_another_format_version_is_refused_and_not_called_damaged(tmp_path):
    path = write(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format_version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="format 99") as caught:
        checkpoint.load(path)
    assert not isinstance(caught.value, CheckpointDamagedError)


WRITER = """
import sys, torch
from pathlib import Path
from burnish.train import checkpoint
step = 1
while True:
    tensors = {"a": torch.full((300_000,), float(step))}
    checkpoint.save(Path(sys.argv[1]), step=step, tensors=tensors, scalars={}, payload={}, keep=2)
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
    step += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_saves", range(1, 6))
def test_kill_dash_nine_leaves_only_whole_checkpoints(tmp_path, num_saves):
    """The writer dies at some moment of a later save; the reader is never misled."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for _ in range(num_saves):
        confirmed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert checkpoint.step_of(newest) >= confirmed
    for path in checkpoint.checkpoints(tmp_path):
        found = checkpoint.load(path)
        assert found.tensors["a"].eq(found.step).all()
    write(tmp_path, 1000)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False)
    if not mounted or mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_debris(small_disk, monkeypatch, foreseen):
    old = write(small_disk, 1, num=1000)
    if not foreseen:
        monkeypatch.setattr(checkpoint, "ensure_free_space", lambda *_: None)
    with pytest.raises(DiskFullError, match="no space left"):
        write(small_disk, 2, num=2_000_000)
    assert [p.name for p in small_disk.iterdir()] == [old.name]
    assert checkpoint.load(old).step == 1


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        checkpoint.load(tmp_path / "step-00000009")


def test_a_failed_write_of_the_state_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, step=1, tensors={}, scalars={}, payload={"x": object()})
    assert list(tmp_path.iterdir()) == []
