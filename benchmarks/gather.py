"""Pages to ring: GB/s and share of the link, by every way and by the planner.

python -m benchmarks.gather [--out DIR] [--quick]
"""

from benchmarks._copies import main

CODE = (
    "adp_kv/kernels",
    "adp_kv/transfer/copy_engine.py",
    "adp_kv/transfer/cuda_mover.py",
    "adp_kv/transfer/device.py",
    "adp_kv/transfer/pipes.py",
    "adp_kv/transfer/plan.py",
    "adp_kv/transfer/settings.py",
    "adp_kv/transfer/tables.py",
)
TARGETS = {"": 0.94}

if __name__ == "__main__":
    main("gather", __doc__, TARGETS, to_device=False)
