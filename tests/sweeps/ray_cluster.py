"""A Ray cluster of two nodes on one machine, as a program.

It prints the address. Each line on its input kills the second node, if there is one, and else adds
one; it answers with a line. At the end of its input everything ends.

A program of its own, so that Ray starts its processes from one without JAX, and so that they end
with it whatever happens to a test.
"""

import sys

from ray.cluster_utils import Cluster

# A dead node is noticed after a second or two instead of half a minute.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


def main() -> None:
    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    head = {**node, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    print("address", cluster.address, flush=True)
    for _ in sys.stdin:
        if second is not None:
            cluster.remove_node(second, allow_graceful=False)
            second = None
        else:
            second = cluster.add_node(**node)
            cluster.wait_for_nodes()
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
