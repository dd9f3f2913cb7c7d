"""Context-parallel prefill: worker processes compute the keys and values of a long prompt.

prefill(tokens) -> workers (zig-zag pieces, blocks round the ring) -> files -> layers
                                                                      '-> EngineCore.adopt
"""

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import torch
from torch import Tensor

from burnish.core.errors import ClassifiedFailure, UserError, boundary
from burnish.core.records import Failure
from burnish.core.vocabulary import FailureKind
from burnish.model.config import ModelConfig
from burnish.rollout.engine.ring.split import pieces_of, positions_of
from burnish.rollout.engine.ring.worker import DTYPES, WHERE

_GRACE_S = 5.0


class LayerKeys(NamedTuple):
    """One layer of a prompt."""

    k_TKD: Tensor
    """Rotated keys."""
    v_TKD: Tensor
    """Values."""


class RingPrefill:
    """A group of worker processes; for one caller at a time."""

    def __init__(
        self,
        config: ModelConfig,
        state: Mapping[str, Tensor],
        *,
        num_workers: int,
        dtype: torch.dtype = torch.bfloat16,
        threads_per_worker: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        """Start the workers and wait until all hold the weights.

        Args:
            config: the model.
            state: named as `Decoder.state_dict()`; copied.
            num_workers: processes.
            dtype: as the engine's.
            threads_per_worker: of each process.
            timeout_s: for the start, and for each prompt.

        Raises:
            UserError: if such a model or group is not possible.
            ClassifiedFailure: naming the worker that failed.
        """
        if num_workers < 1:
            raise UserError(f"{num_workers} prefill workers.", fix="use at least 1.")
        if config.sliding_window is not None:
            raise UserError(
                "prefill over processes does not know sliding windows.",
                fix="let the engine itself read the prompts of this model.",
            )
        self.config, self.num_workers, self._timeout_s = config, num_workers, timeout_s
        self.dtype = dtype
        self._failure: Failure | None = None
        self._is_broken = False
        self._stack = contextlib.ExitStack()
        with self._stack, boundary(FailureKind.INFRA, WHERE):
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="burnish-ring-"))
            self._folder = Path(folder)
            self._describe(state, threads_per_worker)
            self._workers = [self._start(rank, threads_per_worker) for rank in range(num_workers)]
            self._collect("is_ready")
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process numbers, by rank."""
        return [worker.pid for worker in self._workers]

    def prefill(self, tokens: tuple[int, ...]) -> list[LayerKeys]:
        """Keys and values of all tokens in every layer.

        Raises:
            ClassifiedFailure: naming the worker that failed; the group is gone then.
        """
        if self._failure is not None:
            raise ClassifiedFailure(self._failure)
        pieces = pieces_of(len(tokens), self.num_workers)
        c, item = self.config, self.dtype.itemsize
        per_token = c.num_layers * 2 * c.num_kv_heads * c.head_dim
        files = [str(self._folder / f"keys-{rank}") for rank in range(self.num_workers)]
        positions = [positions_of(each) for each in pieces]
        with boundary(FailureKind.INFRA, WHERE):
            for path, own in zip(files, positions, strict=True):
                _reserve(path, max(1, len(own) * per_token * item))
            self._send({"tokens": tokens, "files": files})
            self._collect("is_done")
            return self._assemble(files, positions)

    def close(self) -> None:
        """Stop the workers. Idempotent."""
        if self._failure is None:
            self._failure = _failed("the prefill workers were stopped")
        self._stack.close()

    def _describe(self, state: Mapping[str, Tensor], num_threads: int) -> None:
        """Write what every worker reads first."""
        torch.save(
            {name: tensor.detach().to(self.dtype) for name, tensor in state.items()},
            self._folder / "weights.pt",
        )
        names = {value: name for name, value in DTYPES.items()}
        setup = {
            "config": msgspec.to_builtins(self.config),
            "dtype": names[self.dtype],
            "num_threads": num_threads,
            "weights": "weights.pt",
        }
        (self._folder / "setup.json").write_text(json.dumps(setup))

    def _start(self, rank: int, threads: int) -> "subprocess.Popen[str]":
        arguments = [str(rank), str(self.num_workers), str(self._folder), str(self._timeout_s)]
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        log = self._stack.enter_context((self._folder / f"log-{rank}").open("w"))
        process = subprocess.Popen(
            [sys.executable, "-m", "burnish.rollout.engine.ring.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
            },
        )
        self._stack.callback(self._stop, process)
        return process

    def _send(self, job: dict[str, Any]) -> None:
        line = json.dumps(job) + "\n"
        for worker in self._workers:
            assert worker.stdin is not None
            # A worker that died is named when its answer is missing.
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(line)
                worker.stdin.flush()

    def _collect(self, wanted: str) -> None:
        """Wait for one answer of each worker."""
        deadline = time.monotonic() + self._timeout_s
        waiting = set(range(self.num_workers))
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, rank)
            while waiting:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(map(str, sorted(waiting)))
                    self._fail(f"no answer from prefill worker {late} in {self._timeout_s:g} s")
                for key, _ in ready:
                    answer = key.fileobj.readline()  # type: ignore[union-attr]
                    if wanted not in (json.loads(answer) if answer else {}):
                        self._blame(key.data, answer)
                    waiting.discard(key.data)

    def _blame(self, rank: int, answer: str) -> None:
        """Name the worker at fault: who ended without a word, rather than who missed it."""
        deadline = time.monotonic() + _GRACE_S
        for other, worker in enumerate(self._workers):
            code = _exit_code(worker, deadline) if answer else worker.poll()
            if code not in (None, 0, 1):
                self._fail(f"prefill worker {other} (process {worker.pid}) {_ended(code)}")
        if not answer:
            code = _exit_code(self._workers[rank], deadline)
            pid, last = self._workers[rank].pid, self._last_words(rank)
            self._fail(f"prefill worker {rank} (process {pid}) {_ended(code)}{last}")
        self._fail(f"prefill worker {rank}: {json.loads(answer).get('error', answer)}")

    def _stop(self, process: "subprocess.Popen[str]") -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        # A worker without jobs ends by itself; one of a broken group may wait for the others.
        if self._is_broken or _exit_code(process, time.monotonic() + _GRACE_S) is None:
            process.kill()
            process.wait()

    def _last_words(self, rank: int) -> str:
        lines = (self._folder / f"log-{rank}").read_text(errors="replace").split("\n")
        words = [line for line in lines if line.strip()]
        return f": {words[-1].strip()}" if words else ""

    def _fail(self, message: str) -> None:
        self._failure, self._is_broken = _failed(message), True
        self._stack.close()
        raise ClassifiedFailure(self._failure)

    def _assemble(self, files: list[str], positions: list[list[int]]) -> list[LayerKeys]:
        c = self.config
        num_tokens = sum(map(len, positions))
        parts = []
        for path, own in zip(files, positions, strict=True):
            shape = (c.num_layers, 2, len(own), c.num_kv_heads, c.head_dim)
            flat = torch.from_file(path, shared=True, size=math.prod(shape), dtype=self.dtype)
            parts.append(flat.view(shape))
            Path(path).unlink()
        layers = []
        for layer in range(c.num_layers):
            both = parts[0].new_empty((2, num_tokens, c.num_kv_heads, c.head_dim))
            for part, own in zip(parts, positions, strict=True):
                both[:, torch.tensor(own, dtype=torch.int64)] = part[layer]
            layers.append(LayerKeys(both[0], both[1]))
        return layers


def _reserve(path: str, num_bytes: int) -> None:
    """A file of that size with all its blocks: a hole in it would kill who writes there."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
        else:
            os.truncate(fd, num_bytes)
    finally:
        os.close(fd)


def _exit_code(process: "subprocess.Popen[str]", deadline: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, deadline - time.monotonic()))
    return None


def _ended(code: int | None) -> str:
    if code is None:
        return "closed its output"
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _failed(message: str) -> Failure:
    return Failure(kind=FailureKind.INFRA, where=WHERE, message=message)
