"""Pages to ring: GB/s and share of the link, by every way and by the planner.

python -m benchmarks.gather [--out DIR] [--quick]
"""

from benchmarks._copies import main

CODE = ("adp_kv/kernels", "adp_kv/transfer")
TARGETS = {"": 0.94}

if __name__ == "__main__":
    main("gather", __doc__, TARGETS, to_device=False)
