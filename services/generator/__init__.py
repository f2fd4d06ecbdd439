"""The generator: turns a request into a group of rollouts with vLLM."""
