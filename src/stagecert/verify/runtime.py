"""Models in ONNX Runtime, which runs in a process of its own: it may crash on a model."""

import atexit
import gzip
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from stagecert.errors import ProblemError
from stagecert.verify import runtime_server
from stagecert.verify.runtime_server import receive, send

_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


class Crashed(Exception):
    """The process ended instead of answering."""


class Runtime:
    """The process. It is started when it is first asked for, and again after a crash."""

    def __init__(self):
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._owner = 0
        self.life = 0  # counts the processes: a model that was opened in another one is not open
        self.numbers = 0
        # Models that nobody has any more. They are closed with the next message: the garbage
        # collector, which finds them, may come in the middle of one.
        self.unwanted: deque[int] = deque()

    def start(self) -> None:
        """Starts the process unless it is there: its imports take half a second."""
        with self._lock:
            # A process that was made by a fork has the pipes of its parent, which are not its own.
            if self._process is not None and self._owner == os.getpid():
                return
            if not sys.executable:
                raise ProblemError("ONNX Runtime cannot be started: Python does not know its path.")
            # Signals wait until the new process ignores them.
            masked = hasattr(signal, "pthread_sigmask")
            before = masked and signal.pthread_sigmask(
                signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM)
            )
            try:
                self._process = subprocess.Popen(
                    [sys.executable, str(Path(runtime_server.__file__).absolute())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            finally:
                if masked:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)  # type: ignore
            self._owner = os.getpid()
            self.life += 1

    def ask(self, heading: dict, arrays=(), life: int | None = None) -> tuple[dict, list]:
        """An answer to a message.

        `life` is the process that is meant, if it is not just any.

        Raises:
            Crashed: the process ended; the text says how.
            ProblemError: what the process says is wrong.
        """
        with self._lock:
            self.start()
            if life is not None and life != self.life:
                raise Crashed("it was started anew")
            process = self._process
            assert process is not None
            close = []
            while self.unwanted:
                close.append(self.unwanted.popleft())
            try:
                send(process.stdin, {**heading, "close": close}, arrays)
                answer = receive(process.stdout)
            except OSError:  # a broken pipe
                answer = None
            except BaseException:
                # The next message must not get the answer to this one.
                process.kill()
                self._buried()
                raise
            if answer is None:
                raise Crashed(self._buried())
        found, _ = answer
        if "missing" in found:
            raise ProblemError(
                "Checking counterexamples needs the package onnxruntime: pip install onnxruntime "
                f"({found['missing']})"
            )
        if "error" in found:
            raise ProblemError(found["error"])
        return answer

    def next_number(self) -> int:
        """A number for a model that is opened."""
        with self._lock:
            self.numbers += 1
            return self.numbers

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._process.kill()
                self._buried()

    def _buried(self) -> str:
        """How the process ended."""
        process, self._process = self._process, None
        assert process is not None
        try:
            code = process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for stream in (process.stdin, process.stdout):
            try:
                stream.close()  # type: ignore
            except OSError:  # what could not be written any more
                continue
        if code >= 0:
            return f"exit status {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"


RUNTIME = Runtime()
atexit.register(RUNTIME.close)


class Session:
    """A model in ONNX Runtime.

    Attributes:
        inputs: (name, shape, type) of each.
    """

    def __init__(self, model, runtime: Runtime = RUNTIME):
        """Opens a model: a path (.onnx or .onnx.gz), bytes, or an onnx.ModelProto.

        Raises:
            ProblemError: ONNX Runtime cannot load it.
        """
        self._runtime, self._life, self._number = runtime, 0, runtime.next_number()
        self._path, self._data = None, b""
        if isinstance(model, (str, Path)):
            if str(model).endswith(".gz"):
                self._data = gzip.decompress(Path(model).read_bytes())
            else:
                self._path = str(Path(model).absolute())
        else:
            self._data = model if isinstance(model, bytes) else model.SerializeToString()
        self.inputs: list[tuple[str, tuple[int, ...], Any]] = self._open()
        weakref.finalize(self, runtime.unwanted.append, self._number)

    def run(self, points: np.ndarray) -> np.ndarray:
        """The outputs (points, numbers), flattened and joined, at points (points, numbers).

        Raises:
            ProblemError: the points do not fit, or ONNX Runtime fails.
        """
        size = sum(int(np.prod(shape)) for _, shape, _ in self.inputs)
        if points.shape[1] != size:
            raise ProblemError(
                f"The model takes {size} numbers, but the property {points.shape[1]}."
            )
        arrays, begin = [], 0
        for _, shape, kind in self.inputs:
            end = begin + int(np.prod(shape))
            part = points[:, begin:end].reshape(len(points), *shape)
            arrays.append(np.ascontiguousarray(part, kind))
            begin = end
        names = [name for name, _, _ in self.inputs]
        message = {"do": "run", "number": self._number, "names": names}
        self._runtime.start()
        if self._life != self._runtime.life:
            self._open()  # another model ended the process, or this one was forked
        try:
            return self._runtime.ask(message, arrays, self._life)[1][0]
        except Crashed as crash:
            raise ProblemError(f"ONNX Runtime crashes when it runs this model ({crash}).") from None
        except ProblemError as error:
            raise ProblemError(f"ONNX Runtime cannot run the model: {error}") from None

    def _open(self) -> list[tuple[str, tuple[int, ...], Any]]:
        size = len(self._data)
        if self._path is not None and Path(self._path).is_file():
            size = Path(self._path).stat().st_size
        message = {"do": "open", "number": self._number, "path": self._path, "size": size}
        data = () if self._path is not None else (np.frombuffer(self._data, np.uint8),)
        try:
            found, _ = self._runtime.ask(message, data)
        except Crashed as crash:
            raise ProblemError(
                f"ONNX Runtime crashes when it loads this model ({crash})."
            ) from None
        except ProblemError as error:
            raise ProblemError(f"ONNX Runtime cannot load the model: {error}") from None
        self._life = self._runtime.life
        inputs = []
        for name, kind, shape in found["inputs"]:
            if kind not in _TYPES:
                raise ProblemError(f"The model's input '{name}' is a {kind}.")
            shape = tuple(n if isinstance(n, int) and n > 0 else 1 for n in shape)
            inputs.append((name, shape, _TYPES[kind]))
        return inputs
