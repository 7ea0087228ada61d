"""A rank of a scene, started by torchrun: `python -m faults.rank FILE`, in which the scene has put what to call."""

import os
import pickle
import sys
from pathlib import Path

from midstride.engine.processes.lifetime import PARENT, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ.pop(PARENT)))
    pickle.loads(Path(sys.argv[1]).read_bytes())()
