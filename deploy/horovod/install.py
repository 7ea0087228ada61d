"""Install Horovod beside the torch of the running Python, from a wheel that is built once and kept.

Usage: .venv/bin/python deploy/horovod/install.py [-c constraints.txt]

The registry has Horovod as source only, and its last release neither compiles against a torch of
today nor passes a CMake of today; `build` says what makes it. A wheel fits one torch, one Python
and one platform, so these name the folder it is kept in.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

VERSION = "0.28.1"
HERE = Path(__file__).resolve().parent

#: packages that Horovod's setup.py imports without declaring them
BUILD_NEEDS = ["setuptools<82", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml"]
#: CMake 4 rejects the policy versions of Horovod's CMake files
CMAKE = "cmake<4"
#: environment variables that select a build, such as `HOROVOD_GPU_OPERATIONS=NCCL`
CHOICES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}


def cache() -> Path:
    """Return the folder that holds the wheel for this Python, torch, platform and choice of GPU operations."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [
        f"horovod-{VERSION}",
        f"torch-{version('torch')}",
        f"{sys.implementation.cache_tag}",
        sysconfig.get_platform(),
        *filter(None, [os.environ.get("HOROVOD_GPU_OPERATIONS", "").lower()]),
    ]
    return base / "midstride" / "-".join(parts)


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in `folder`, if there is one."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def pip(*arguments: str, **environment: str) -> None:
    """Run this Python's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment})


def build(folder: Path) -> Path:
    """Build the wheel and put it into `folder`, whole or not at all; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        tools = Path(work) / "tools"
        pip("install", "--quiet", "--target", str(tools), CMAKE, *BUILD_NEEDS)
        cmake = tools / "cmake" / "data" / "bin"
        pip(
            *("wheel", "--no-build-isolation", "--no-deps", "--no-binary", "horovod", "--no-cache-dir"),
            *("--wheel-dir", work, f"horovod=={VERSION}"),
            PYTHONPATH=str(tools),
            PATH=f"{cmake}{os.pathsep}{os.environ['PATH']}",
            CXX=str(HERE / "cxx17"),
            MAKEFLAGS=os.environ.get("MAKEFLAGS", f"-j{os.cpu_count() or 1}"),
            **{name: os.environ.get(name, value) for name, value in CHOICES.items()},
        )
        wheel = cached_wheel(Path(work))
        assert wheel is not None
        return wheel.replace(folder / wheel.name)


def main() -> None:
    """Install the wheel; build it first if none is cached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--constraint", help="versions for what Horovod itself needs")
    constraint = parser.parse_args().constraint
    if shutil.which(os.environ.get("HOROVOD_CXX", "c++")) is None:
        sys.exit(
            "Horovod is compiled here, and there is no C++ compiler: install one (Debian: g++, make, python3-dev)."
        )
    folder = cache()
    wheel = cached_wheel(folder)
    if wheel is None:
        print(f"building Horovod {VERSION} for torch {version('torch')}: about five minutes, once", flush=True)
        start = time.monotonic()
        wheel = build(folder)
        print(f"built in {time.monotonic() - start:.0f} s", flush=True)
    pip("install", "--quiet", *(["-c", constraint] if constraint else []), str(wheel))
    print(f"horovod {VERSION}: {wheel}")


if __name__ == "__main__":
    main()
