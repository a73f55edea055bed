"""`adp-kv`: what somebody who runs this needs at a terminal."""
