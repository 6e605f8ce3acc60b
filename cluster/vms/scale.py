"""Asks the autoscaler for CPUs and GPUs, and waits for them: Concord counts what a cluster has when a run starts.

``ray exec cluster/vms/aws.yaml 'python ~/concord/cluster/vms/scale.py --cpus 32 --gpus 4'``; ``--cpus 0`` lets idle
nodes go.
"""

import argparse
import logging
import sys
import time

import ray
from ray.autoscaler.sdk import request_resources


def main() -> int:
    """Exit status 0 when they are there, 1 when they are not after the limit; what was asked for stands either way."""
    parser = argparse.ArgumentParser(description="Ask the autoscaler for CPUs and GPUs, and wait for them.")
    parser.add_argument("--cpus", type=int, required=True, help="CPUs of all workers together")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of all workers together")
    parser.add_argument("--minutes", type=float, default=20, help="how long to wait")
    wanted = parser.parse_args()
    ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    # A request replaces the one before it.
    request_resources(num_cpus=wanted.cpus, bundles=[{"GPU": 1}] * wanted.gpus)
    end = time.monotonic() + 60 * wanted.minutes
    while True:
        there = ray.cluster_resources()
        said = ", ".join(f"{there.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
        if there.get("CPU", 0) >= wanted.cpus and there.get("GPU", 0) >= wanted.gpus:
            print(f"there are {said}")
            return 0
        if time.monotonic() > end:
            print(f"after {wanted.minutes:g} minutes there are only {said}; ray status says why", file=sys.stderr)
            return 1
        time.sleep(5)


if __name__ == "__main__":
    raise SystemExit(main())
