"""Small files are read with little memory, though large ones are allowed."""

import subprocess
import sys
from pathlib import Path

DIGITS = Path(__file__).parents[2] / "src" / "stagecert" / "digits" / "digits.onnx"


def test_the_checker_reads_a_small_model_with_little_address_space():
    """Both readers asked for two GiB at once, to see whether a file is larger than that."""
    script = (
        "import resource\n"
        "from stagecert_check.external import model_contents\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))\n"
        f"print(len(model_contents({str(DIGITS)!r}).data))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == DIGITS.stat().st_size
