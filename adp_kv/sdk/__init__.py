"""The client of the gateway, one per tensor-parallel rank."""
