"""The trainer: turns samples into policy versions, and owns the dataset's cursor."""
