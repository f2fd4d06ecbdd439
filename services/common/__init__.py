"""What two services or more need: the recipe, the streams, metrics, gRPC, the life of a process."""

import os

# Read when grpc is imported, so it is here, before any module that does. gRPC's core else writes a
# line to stderr for every peer that goes away, among our own log lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
