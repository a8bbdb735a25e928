"""ONNX Runtime in a process of its own: a program that opens models and runs them when asked to.

`stagecert.verify.runtime` starts it by its path. So it imports nothing of stagecert, which would
import JAX. It reads messages from standard input and writes one answer to each to what was its
standard output, and ends when its input does.

A message is its length (8 bytes), the length of its heading (8 bytes), the heading as JSON, and the
arrays that the heading lists as [type, shape], one after the other.
"""

import json
import math
import os
import signal
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

# Bytes of memory: so many, and so many times the size of a model.
MEMORY, TIMES_MODEL = 8 << 30, 8
# So many points are worth threads.
MANY = 64
LENGTHS = struct.Struct("<QQ")


def send(stream, heading: dict, arrays=()) -> None:
    """Writes a message; the arrays are contiguous."""
    heading = {**heading, "arrays": [[a.dtype.str, a.shape] for a in arrays]}
    text = json.dumps(heading).encode()
    total = len(text) + sum(a.nbytes for a in arrays)
    stream.write(LENGTHS.pack(total, len(text)) + text)
    for a in arrays:
        stream.write(a.tobytes())
    stream.flush()


def receive(stream) -> tuple[dict, list] | None:
    """Reads a message; None where the stream ends, be it in the middle of one."""
    import numpy as np

    start = stream.read(LENGTHS.size)
    if len(start) < LENGTHS.size:
        return None
    total, of_text = LENGTHS.unpack(start)
    data = stream.read(total)
    if len(data) < total:
        return None
    heading, arrays, begin = json.loads(data[:of_text]), [], of_text
    for kind, shape in heading["arrays"]:
        arrays.append(np.frombuffer(data, kind, math.prod(shape), begin).reshape(shape))
        begin += arrays[-1].nbytes
    return heading, arrays


def processors() -> int:
    """How many processors this process may use."""
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count() or 1


class Server:
    """The open models, by number."""

    def __init__(self):
        self.sessions: dict = {}

    def open(self, heading: dict, arrays: list) -> tuple[dict, list]:
        """Opens a model, given by its path or its bytes; says what its inputs are."""
        import onnxruntime

        path = heading["path"]
        model = arrays[0].tobytes() if path is None else path
        self.allow(heading["size"])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.sessions[heading["number"]] = session
        return {"inputs": [[v.name, v.type, v.shape] for v in session.get_inputs()]}, []

    def run(self, heading: dict, arrays: list) -> tuple[dict, list]:
        """Runs a model at several points, each by itself: arrays (points, *shape).

        Many points are run in several threads: outputs are the same then, bit by bit, which those
        of several points in one array need not be.
        """
        import numpy as np

        session, names = self.sessions[heading["number"]], heading["names"]

        def run(k: int):
            # An input without axes must be an array too.
            feeds = {n: np.asarray(a[k]) for n, a in zip(names, arrays, strict=True)}
            outputs = session.run(None, feeds)
            return np.concatenate([np.asarray(x).reshape(-1) for x in outputs])

        count = len(arrays[0])
        if count < MANY:
            found = [run(k) for k in range(count)]
        else:
            with ThreadPoolExecutor(processors()) as threads:
                found = list(threads.map(run, range(count)))
        if found[0].dtype.kind not in "fiub":
            raise TypeError("Its outputs are no numbers.")
        return {}, [np.stack(found)]

    @staticmethod
    def allow(size: int) -> None:
        """Limits the memory to what a model of so many bytes may take."""
        try:
            import resource
        except ImportError:  # not on this system
            return
        now, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = MEMORY + TIMES_MODEL * size
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if now == resource.RLIM_INFINITY or now < wanted:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def end_with(parent: int) -> None:
    """Ends this process when its parent is no more, also while a model runs."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """Answers until the input ends."""
    # The parent decides when a signal of the terminal ends the work.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    # What ONNX Runtime prints is no answer.
    os.dup2(2, 1)
    try:
        import onnxruntime  # noqa: F401
    except Exception as error:
        missing: str | None = str(error)
    else:
        missing = None
    server = Server()
    while (message := receive(source)) is not None:
        heading, arrays = message
        if missing is not None:
            send(sink, {"missing": missing})
            continue
        for number in heading["close"]:
            server.sessions.pop(number, None)
        try:
            answer, found = getattr(server, heading["do"])(heading, arrays)
        except Exception as error:  # ONNX Runtime has no common base class for its errors
            answer, found = {"error": str(error) or type(error).__name__}, []
        send(sink, answer, found)


if __name__ == "__main__":
    # The folder of this file is no place to import from: it has modules of all kinds of names.
    sys.path[:] = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]
    main()
