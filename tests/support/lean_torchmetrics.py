"""Imported before torchmetrics, leaves out what only plots, texts and sounds need: 2 s and 120 MB in every process.

From a process that holds so much more, each rank is forked at twice the cost.
"""

from lightning_utilities.core import imports

_LEFT_OUT = ("matplotlib", "scipy", "transformers")
_is_available = imports.package_available


class _Requirement(imports.RequirementCache):
    def __init__(self, requirement: str | None = None, module: str | None = None) -> None:
        super().__init__(requirement, module)
        if requirement is not None and requirement.startswith(_LEFT_OUT):
            self.available = False


imports.RequirementCache = _Requirement
imports.package_available = lambda name: name not in _LEFT_OUT and _is_available(name)
