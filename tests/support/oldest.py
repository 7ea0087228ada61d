"""Print the oldest versions that pyproject.toml takes of what midstride depends on, as constraints for pip."""

import re
import tomllib
from pathlib import Path

_LEAST = re.compile(r"(?P<name>[\w-]+)>=(?P<version>[\d.]+)")


def oldest(project: Path) -> list[str]:
    """Return "name==version" for each dependency of the project whose `pyproject.toml` is at `project`."""
    dependencies: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    return ["{name}=={version}".format(**found.groupdict()) for found in map(_LEAST.match, dependencies) if found]


if __name__ == "__main__":
    print("\n".join(oldest(Path(__file__).parents[2] / "pyproject.toml")))
