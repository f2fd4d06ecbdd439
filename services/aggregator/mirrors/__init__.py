"""What other trackers are fed with: each step's reduced values, in order, each step once."""
