"""ONNX Runtime in a process of its own, since some models end it.

`python -m benchmarks.fuzz.runtime` is that process: it reads pickled (model, list of feeds) from
its standard input, each behind its length, and answers with lists of outputs or with a message.
"""

import pickle
import selectors
import struct
import subprocess
import sys

_SECONDS = 20.0


class Runtime:
    """Runs models; a crash is a message, and the next model gets a new process."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def run(self, model: bytes, feeds: list[dict]) -> list | str:
        """The outputs for each of the feeds, or why there are none."""
        if self._process is None:
            command = [sys.executable, "-m", "benchmarks.fuzz.runtime"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = pickle.dumps((model, feeds))
        try:
            self._process.stdin.write(struct.pack("<q", len(data)) + data)
            self._process.stdin.flush()
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._process.stdout, selectors.EVENT_READ)
                if not waiting.select(_SECONDS):
                    self.close()
                    return "ONNX Runtime takes too long"
            (length,) = struct.unpack("<q", self._process.stdout.read(8))
            return pickle.loads(self._process.stdout.read(length))
        except (OSError, struct.error, EOFError, pickle.UnpicklingError):
            self.close()
            return "ONNX Runtime crashed"

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _serve() -> None:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    out, source = sys.stdout.buffer, sys.stdin.buffer
    while head := source.read(8):
        model, feeds = pickle.loads(source.read(struct.unpack("<q", head)[0]))
        try:
            session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
            found: list | str = [session.run(None, one) for one in feeds]
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:200]}"
        data = pickle.dumps(found)
        out.write(struct.pack("<q", len(data)) + data)
        out.flush()


if __name__ == "__main__":
    _serve()
