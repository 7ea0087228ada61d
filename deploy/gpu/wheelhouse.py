"""Collect the few packages that a machine with Python and torch alone lacks to train: under 5 MB, in build/wheelhouse.

python deploy/gpu/wheelhouse.py --python 3.12

Take the checkout with that folder to the machine, which needs no network, and run `make test-gpu` there.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: packages that the engine imports, besides torch and numpy
PACKAGES = ["pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "xxhash"]


def main() -> None:
    """Download them for the Python named; by default for this one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    version = parser.parse_args().python
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={version}", "--dest", str(ROOT / "build/wheelhouse")]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *PACKAGES], check=True)


if __name__ == "__main__":
    main()
