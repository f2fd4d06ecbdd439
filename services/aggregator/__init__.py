"""The aggregator: turns metric deltas into history and answers."""
