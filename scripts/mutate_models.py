"""Give the compiler thousands of damaged and absurd model files.

Each file is loaded, normalised, cut, compiled and trained for one step in a worker process
with bounds on memory and time. It must work, or be refused by one of the package's own
errors. All else is a defect: a crash, another kind of exception, 10 s of computing, 2 GB.

Run as ``python scripts/mutate_models.py [--count N] [--seed S] [--jobs J]``, and with
``--seed-case N`` to repeat one case in this process, with its traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final

import msgspec
import numpy as np
from hostile_bases import bases
from hostile_case import train_once
from hostile_edits import damaged_bytes, damaged_model
from hostile_nodes import pick

from edgetrain.errors import EdgeTrainError, EngineError

COMPUTE_LIMIT_S: Final = 10  # of processor time
WALL_LIMIT_S: Final = 60
MEMORY_LIMIT_BYTES: Final = 2 << 30
MAX_MESSAGE: Final = 1500  # characters; more is no paragraph
_NO_MEMORY: Final = ("bad_alloc", "Failed to allocate", "cannot allocate")
WORKS: Final = "works"
REFUSED: Final = "refused: "


class Outcome(msgspec.Struct):
    """What became of a case.

    Attributes:
        kind: "works", "refused: ERROR", or a defect: "crash", "hang", "memory", "foreign:
            EXCEPTION", "unclear: ERROR" where the message is no clear paragraph.
    """

    case: int
    base: str
    edits: str
    kind: str
    text: str = ""
    seconds: float = 0.0

    @property
    def is_defect(self) -> bool:
        return self.kind != WORKS and not self.kind.startswith(REFUSED)


class Mill:
    """Makes the damaged files of one seed.

    Args:
        seed: with a case's number, decides all about it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._bases = bases()

    def case(self, number: int) -> tuple[str, str, bytes]:
        """The base, what was done to it, and the file."""
        rng = np.random.default_rng([self._seed, number])
        name = pick(rng, sorted(self._bases))
        data = self._bases[name]
        if rng.random() < 0.3:
            other = self._bases[pick(rng, sorted(self._bases))]
            return name, *damaged_bytes(data, other, rng)
        return name, *damaged_model(data, rng)


def attempt(mill: Mill, number: int, folder: Path) -> Outcome:
    """Try a case in this process; what is no exception, such as a crash, ends it."""
    base, edits, data = mill.case(number)
    path = folder / "model.onnx"
    path.write_bytes(data)
    outcome = Outcome(number, base, edits, WORKS)
    started = time.process_time()
    try:
        train_once(path)
    except EdgeTrainError as error:
        outcome.text = str(error)
        outcome.kind = _judged(error)
    except MemoryError as error:
        outcome.kind, outcome.text = "memory", repr(error)
    except Exception as error:  # noqa: BLE001  that any kind may come is what is tested
        outcome.kind = f"foreign: {type(error).__name__}"
        outcome.text = _place(error)
    outcome.seconds = round(time.process_time() - started, 2)
    return outcome


def _judged(error: EdgeTrainError) -> str:
    name, text = type(error).__name__, str(error)
    if any(words in text for words in _NO_MEMORY):
        return "memory"
    if isinstance(error, EngineError):
        return f"unclear: {name}"  # a graph of ours that the engine refuses
    if not text or len(text) > MAX_MESSAGE or "Traceback" in text:
        return f"unclear: {name}"
    return REFUSED + name


def _place(error: BaseException) -> str:
    """The exception, and the innermost place of our own that it passed."""
    place, trace = "", error.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        if "edgetrain" in code.co_filename:
            place = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return f"{place}: {error}"


def work(seed: int) -> None:
    """Be a worker: case numbers come in on standard input, outcomes leave on output."""
    # Libraries print too: they get standard error.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    faulthandler.enable()
    mill = Mill(seed)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            used_s = int(time.process_time())
            limit = (used_s + 1 + COMPUTE_LIMIT_S, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_CPU, limit)
            _bound_memory()
            outcome = attempt(mill, int(line), Path(folder))
            answers.write(msgspec.json.encode(outcome) + b"\n")


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))


class Worker:
    """A process that tries cases; a new one takes its place when it dies.

    Args:
        seed: of the cases.
    """

    def __init__(self, seed: int) -> None:
        self._command = [sys.executable, __file__, "--work", "--seed", str(seed)]
        self._mill = Mill(seed)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`

    def run(self, case: int) -> Outcome:
        process = self._process = self._process or self._started()
        _stream(process.stdin).write(f"{case}\n".encode())
        _stream(process.stdin).flush()
        answer = self._answer(process)
        if answer:
            return msgspec.json.decode(answer, type=Outcome)
        return self._post_mortem(process, case)

    def close(self) -> None:
        if self._process:
            self._process.communicate()  # closes its input, at which it ends
        self._log.close()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(  # noqa: S603 - nothing of it comes from outside
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def _answer(self, process: subprocess.Popen[bytes]) -> bytes:
        """A line, or nothing where none comes."""
        ready, _, _ = select.select([process.stdout], [], [], WALL_LIMIT_S)
        return _stream(process.stdout).readline() if ready else b""

    def _post_mortem(self, process: subprocess.Popen[bytes], case: int) -> Outcome:
        process.kill()
        process.communicate()
        code, self._process = process.returncode, None
        base, edits, _ = self._mill.case(case)
        slow = code in (-signal.SIGXCPU, -signal.SIGKILL)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self._log.seek(0)
        self._log.truncate()
        text = f"ended with code {code}: {' | '.join(lines[-12:])}"
        return Outcome(case, base, edits, "hang" if slow else "crash", text)


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("the worker was started without pipes")
    return stream


def run_all(cases: Sequence[int], seed: int, jobs: int) -> Iterator[Outcome]:
    """Try all cases on as many workers as `jobs`; outcomes come in the order of cases."""
    idle: SimpleQueue[Worker] = SimpleQueue()
    workers = [Worker(seed) for _ in range(jobs)]
    for worker in workers:
        idle.put(worker)

    def run(case: int) -> Outcome:
        worker = idle.get()
        try:
            return worker.run(case)
        finally:
            idle.put(worker)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, cases)
    finally:
        for worker in workers:
            worker.close()


def report(outcomes: Sequence[Outcome]) -> str:
    """A table of what became of the files, and a line for every defect."""
    counts = Counter(outcome.kind for outcome in outcomes)
    lines = [f"{count:6} {kind}" for kind, count in counts.most_common()]
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    lines.append(f"{len(outcomes):6} files; the slowest took {slowest} s of processor time")
    for outcome in outcomes:
        if outcome.is_defect:
            text = " ".join(outcome.text.split())[:400]
            head = f"case {outcome.case} ({outcome.base}, {outcome.edits})"
            lines.append(f"{head}: {outcome.kind}: {text}")
    return "\n".join(lines)


def repeat(seed: int, case: int) -> None:
    """One case in this process: prints what is refused, and lets all else out."""
    base, edits, data = Mill(seed).case(case)
    print(f"{base}, {edits}, {len(data)} B")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(data)
        try:
            train_once(path)
        except EdgeTrainError as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print(WORKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed-case", type=int, metavar="N", help="repeat one case here")
    parser.add_argument("--log", type=Path, help="write each outcome here, as JSON lines")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.seed)
        return
    if arguments.seed_case is not None:
        repeat(arguments.seed, arguments.seed_case)
        return
    cases = range(arguments.count)
    outcomes = []
    for outcome in run_all(cases, arguments.seed, arguments.jobs):
        outcomes.append(outcome)
        if arguments.log:
            with arguments.log.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
    print(report(outcomes))
    sys.exit(any(outcome.is_defect for outcome in outcomes))


if __name__ == "__main__":
    main()
