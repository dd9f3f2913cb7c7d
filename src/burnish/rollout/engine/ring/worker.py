"""A process that computes a part of long prompts: jobs as JSON lines in, answers out.

python -m burnish.rollout.engine.ring.worker RANK WORKERS FOLDER TIMEOUT_S
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch

from burnish.core.errors import ClassifiedFailure, UserError, boundary
from burnish.core.vocabulary import FailureKind
from burnish.model.config import ModelConfig
from burnish.rollout.engine.ring.attend import Ring, RingAttend
from burnish.rollout.engine.ring.split import pieces_of, positions_of
from burnish.rollout.engine.weights import ServedModel

WHERE = "rollout.engine.ring"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: list[str], jobs: TextIO, answers: TextIO) -> int:
    """Serve until `jobs` ends; 1 after an error, which was answered."""
    rank, num_workers, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    try:
        with boundary(FailureKind.INFRA, WHERE):
            setup = json.loads((folder / "setup.json").read_text())
            config = msgspec.convert(setup["config"], ModelConfig)
            torch.set_num_threads(setup["num_threads"])
            state = torch.load(folder / setup["weights"], mmap=True, weights_only=True)
            model = ServedModel(config, state, DTYPES[setup["dtype"]])
            ring = Ring(rank, num_workers, folder / "meeting", float(arguments[3]))
            _say(answers, {"is_ready": True})
            for line in jobs:
                _prefill(model, ring, json.loads(line))
                _say(answers, {"is_done": True})
            ring.close()
    except ClassifiedFailure as error:
        _say(answers, {"error": error.failure.message})
        return 1
    except UserError as error:
        _say(answers, {"error": str(error)})
        return 1
    return 0


def _prefill(model: ServedModel, ring: Ring, job: dict[str, Any]) -> None:
    """Fill this worker's file with the keys and values of its tokens."""
    c, tokens = model.config, job["tokens"]
    pieces = pieces_of(len(tokens), ring.num_workers)
    positions = positions_of(pieces[ring.rank])
    shape = (c.num_layers, 2, len(positions), c.num_kv_heads, c.head_dim)
    size = math.prod(shape)
    path = job["files"][ring.rank]
    kept = torch.from_file(path, shared=True, size=size, dtype=model.dtype).view(shape)
    ids_T = torch.tensor([tokens[p] for p in positions], dtype=torch.int64)
    with torch.inference_mode():
        model.hidden(ids_T, torch.tensor(positions), RingAttend(ring, pieces, kept))


def _say(answers: TextIO, record: dict[str, Any]) -> None:
    answers.write(json.dumps(record) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin, sys.stdout))
