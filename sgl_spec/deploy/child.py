"""A replica's server process: `python -m sgl_spec.deploy.child PARENT_PID [flags]`, which does not
outlive the replica."""

from __future__ import annotations

import sys

from sgl_spec.server.child import die_with_parent
from sgl_spec.server.launch import run

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.exit(run(sys.argv[2:]))
