"""Cards: batch key-value stores behind one contract (base.py)."""
