"""A clock that moves when a test says so."""


class FakeClock:
    """Monotonic seconds; hand it to whatever takes a clock, from any thread."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now

    def advance(self, seconds):
        """Let time pass at once."""
        self.now += seconds
