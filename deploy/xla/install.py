"""Install torch_xla, the torch it was made for and midstride's engine into the running Python, to test in.

Usage: .cache/xla/bin/python deploy/xla/install.py -c constraints.txt

On the CPU alone, torch_xla needs nothing of CUDA; but the registry has only one torch 2.9 for this platform, which does
not load without 3 GB of CUDA's libraries. They are left out: libraries of the same names take their places, in
which every function ends the process. What calls none of them runs as ever, and nothing else may be done here.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

VERSION = "2.9.0"
#: libraries of CUDA that are installed: small, with data that is read when torch is loaded
CUDA = [
    "nvidia-cuda-cupti-cu12==12.8.90",
    "nvidia-cuda-runtime-cu12==12.8.90",
    "nvidia-cufile-cu12==1.13.1.3",
    "nvidia-nvtx-cu12==12.8.90",
]
#: packages that torch and torch_xla import
TORCH_NEEDS = ["absl-py", "filelock", "jinja2", "networkx", "pyyaml", "requests", "sympy", "typing_extensions"]
#: packages that the engine and its tests import
ENGINE_NEEDS = [
    *("cyclopts", "fsspec", "numpy", "pydantic", "rich", "ruamel.yaml", "s3fs", "safetensors", "torchmetrics"),
    *("xxhash", "hypothesis", "pytest", "pytest-timeout"),
]
#: prefixes of symbols of the omitted libraries, for symbols whose entry does not name a library
_THEIRS = re.compile(r"p?nccl|nvshmem|cu(blas|dnn|fft|rand|solver|sparse)")


def pip(*arguments: str) -> None:
    """Run this Python's pip."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def output_lines(*command: str | Path) -> list[str]:
    """Return the lines of a command's output."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def missing(libraries: list[Path]) -> dict[str, dict[str, set[str]]]:
    """Return the libraries that `libraries` need and that are missing: name -> version -> symbols used."""
    absent = {line.split()[0] for library in libraries for line in output_lines("ldd", library) if "not found" in line}
    wanted: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in sorted(absent)}
    for library in libraries:
        owners: dict[str, str] = {}
        owner = ""
        for line in output_lines("objdump", "-p", library):
            if found := re.search(r"required from (\S+):", line):
                owner = found[1]
            elif found := re.search(r"0x\S+ 0x\S+ \d+ (\S+)", line):
                owners[found[1]] = owner
        for line in output_lines("nm", "-D", "--undefined-only", library):
            symbol, _, version = line.split()[-1].partition("@")
            if owners.get(version) in absent:
                wanted[owners[version]][version].add(symbol)
            elif not version and absent and _THEIRS.match(symbol):
                wanted[min(absent)][""].add(symbol)  # whichever has it
    return wanted


def stand_in(folder: Path, name: str, versions: dict[str, set[str]]) -> None:
    """Build a library `name` in `folder` that defines those symbols."""
    symbols = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "source.c"), Path(work, "versions")
        lines = (f"void {symbol}(void) {{ __builtin_trap(); }}\n" for symbol in symbols)
        source.write_text("".join(lines) or "typedef int nothing;\n")
        script.write_text(
            "".join(
                f"{version} {{ global: {'; '.join(sorted(its))}; }};\n" for version, its in versions.items() if version
            )
        )
        flags = ["-shared", "-fPIC", "-O0", "-w", f"-Wl,-soname,{name}"]
        versioned = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        subprocess.run(["cc", *flags, *versioned, "-o", str(folder / name), str(source)], check=True)


def main() -> None:
    """Install everything that is not installed yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--constraint", required=True, type=Path, help="versions for what the engine needs")
    pinned = parser.parse_args().constraint.read_text().splitlines()
    print(f"installing torch_xla {VERSION} and its torch: 1 GB to fetch, 2.5 GB on disk, once", flush=True)
    pip("install", "--quiet", "--no-deps", f"torch=={VERSION}", f"torch_xla=={VERSION}", *CUDA)
    with tempfile.TemporaryDirectory() as work:
        others = Path(work, "constraints.txt")
        others.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
        pip("install", "--quiet", "-c", str(others), *TORCH_NEEDS)
        # torch's own needs are not here, so nothing that depends on it may look after them.
        pip("install", "--quiet", "-c", str(others), *(name for name in ENGINE_NEEDS if name != "torchmetrics"))
        pip("install", "--quiet", "-c", str(others), "--no-deps", "torchmetrics", "lightning-utilities")
    pip("install", "--quiet", "--no-deps", "-e", str(ROOT))
    folder = Path(sysconfig.get_path("purelib"), "torch", "lib")
    for name, versions in missing(sorted(folder.glob("*.so"))).items():
        stand_in(folder, name, versions)
    subprocess.run([sys.executable, "-c", "import torch_xla"], check=True)


if __name__ == "__main__":
    main()
