"""Write requirements.txt: what the image installs, each file by its hash, in the versions of constraints.txt.

Usage: .venv/bin/python deploy/docker/lock.py

The hashes are those of the registry's own files: wheels that lie on this machine, and settings of its pip that point to
them, are left out of account. Nothing is downloaded but metadata.
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
#: of the image's base: Debian 12 has glibc 2.36
PYTHON, GLIBC = "3.11", range(5, 37)
MACHINES = ("x86_64", "aarch64")
#: a worker that makes a container or a pod of each run
WORKERS = ["prefect-docker", "prefect-kubernetes"]
HEADER = "# Written by lock.py: what the image installs on Linux, x86_64 and aarch64, each file by its hash.\n"


def wanted() -> list[str]:
    """Return what the project itself asks for, to be built and to run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["examples"]
    return [*project["build-system"]["requires"], *project["project"]["dependencies"], *extra, *WORKERS]


def resolved(machine: str) -> dict[str, str]:
    """Return each requirement that pip would install on a kind of machine, and the hash of the file it would take."""
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
    """Resolve for every kind of machine, and write the union."""
    hashes: dict[str, set[str]] = defaultdict(set)
    for machine in MACHINES:
        for requirement, digest in resolved(machine).items():
            hashes[requirement].add(digest)
    lines = [" \\\n    --hash=".join([name, *sorted(digests)]) + "\n" for name, digests in sorted(hashes.items())]
    REQUIREMENTS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
