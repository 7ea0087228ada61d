"""Write requirements.txt: the packages of the image, pinned by constraints.txt, with the hash of each file.

Usage: .venv/bin/python deploy/docker/lock.py

The hashes are those of the files in the registry: local wheels and pip settings are ignored. Only metadata is
downloaded.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
#: Python version and glibc minor versions of the image's base: Debian 12 has glibc 2.36
PYTHON, GLIBC = "3.11", range(5, 37)
MACHINES = ("x86_64", "aarch64")
#: workers that run each flow run in a container or a pod
WORKERS = ["prefect-docker", "prefect-kubernetes"]
HEADER = "# Written by lock.py: what the image installs on Linux, x86_64 and aarch64, each file by its hash.\n"


def wanted() -> list[str]:
    """Return the requirements of the project, for its build and at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["examples"]
    return [*project["build-system"]["requires"], *project["project"]["dependencies"], *extra, *WORKERS]


def resolved(machine: str) -> dict[str, str]:
    """Return the requirements that pip would install on a machine type, each with the hash of the file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    platforms += [f"--platform=manylinux{old}_{machine}" for old in (1, 2010, 2014)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}", *platforms]
        command += [f"--target={folder}", f"--report={report}", f"--constraint={ROOT / 'constraints.txt'}", *wanted()]
        subprocess.run(command, env={**environment, "PIP_CONFIG_FILE": os.devnull}, check=True)
        found = json.loads(report.read_text())["install"]
    return {
        f"{item['metadata']['name'].lower()}=={item['metadata']['version']}": _hash(item["download_info"])
        for item in found
    }


def _hash(download: dict[str, object]) -> str:
    archive, url = download["archive_info"], str(download["url"])
    if not url.startswith("https://") or not isinstance(archive, dict):
        raise SystemExit(f"{url} is no file of the registry")
    return f"sha256:{archive['hashes']['sha256']}"


def main() -> None:
    """Resolve for every machine type, and write the union."""
    hashes: dict[str, set[str]] = defaultdict(set)
    for machine in MACHINES:
        for requirement, digest in resolved(machine).items():
            hashes[requirement].add(digest)
    lines = [" \\\n    --hash=".join([name, *sorted(digests)]) + "\n" for name, digests in sorted(hashes.items())]
    REQUIREMENTS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
