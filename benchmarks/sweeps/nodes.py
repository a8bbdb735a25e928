"""A Ray cluster of one or two nodes on one machine: a program, and the class that runs it.

The program gets the number of CPUs of each node, and prints the address. Each line on its input
kills the second node, if there is one, and else adds one; it answers with a line. At the end of its
input everything ends.

It is a program of its own so that Ray starts its processes from one without JAX, and so that they
end with it whatever happens to whoever started it.
"""

import os
import subprocess
import sys

# A dead node is noticed after a second or two instead of half a minute.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """The cluster, with so many CPUs on each node, until it is closed."""

    def __init__(self, *cpus: int):
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, cpus)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        self.address = self._read("address ").split()[1]

    def kill_or_add(self) -> None:
        """Kills the second node; if that was done before, adds another one."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._read("done")

    def close(self) -> None:
        """Ends the cluster."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _read(self, begin: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line
        raise RuntimeError("The cluster has ended.")


def main(cpus: int, *others: int) -> None:
    """The program."""
    from ray.cluster_utils import Cluster

    node = {"num_gpus": 0, "object_store_memory": 80 * 2**20}
    head = {**node, "num_cpus": cpus, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = None
    for count in others:
        second = cluster.add_node(num_cpus=count, **node)
    cluster.wait_for_nodes()
    print("address", cluster.address, flush=True)
    for _ in sys.stdin:
        if second is not None:
            cluster.remove_node(second, allow_graceful=False)
            second = None
        else:
            second = cluster.add_node(num_cpus=others[-1], **node)
            cluster.wait_for_nodes()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
