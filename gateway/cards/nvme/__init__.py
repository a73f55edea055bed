"""The NVMe key-value card; see `gateway.cards.nvme.card`."""
