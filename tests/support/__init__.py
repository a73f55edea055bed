"""What tests, demo and benchmarks share: tiny models, and real engines, servers and gateways."""
