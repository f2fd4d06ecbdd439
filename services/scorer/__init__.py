"""The scorer: turns a group of rollouts into rewards, advantages and samples."""
