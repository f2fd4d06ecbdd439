"""`python -m tests.deploy.containers` (`make deploy-test`): the images and the cpu overlay, as real
containers on this machine, through a run with scaling and rolling restarts."""
