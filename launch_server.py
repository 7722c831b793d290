"""Start the server: `python launch_server.py --model-path smollm2 --speculative-algorithm
NGRAM`."""

import sys
from pathlib import Path

# The kernels package lives in a folder that is no package itself; an installed copy wins if there
# is one.
sys.path.append(str(Path(__file__).resolve().parent / "kernels"))

from sgl_spec.__main__ import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
