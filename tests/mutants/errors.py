"""Bugs in telling what is the user's error from what a retry may help, and from what ends no training at all."""

from mutants.mutant import Mutant

__all__ = ["ERRORS"]

ERRORS = [
    Mutant(
        "a training ends where the disk of its log is full",
        "engine/session/lasting_output.py",
        "        except OSError as error:\n            self._give_up(error)\n            return len(text)\n",
        "        except BrokenPipeError as error:\n            self._give_up(error)\n            return len(text)\n",
        "unit/session/test_terminal_view.py::test_a_full_disk_ends_no_training",
    ),
    Mutant(
        "an error of an optimizer is taken for one that a retry may help",
        "engine/training/optimizer_step.py",
        'call_user_code(f"{type(optimizer).__name__}.step", given_none, optimizer)',
        "given_none(optimizer)",
        "unit/training/test_refusals.py",
    ),
    Mutant(
        "an error of a scheduler is taken for one that a retry may help",
        "engine/optim/schedulers.py",
        'call_user_code(f"{type(self.scheduler).__name__}.step", self.scheduler.step, *given)',
        "self.scheduler.step(*given)",
        "unit/training/test_refusals.py",
    ),
    Mutant(
        "a fault of the GPU is taken for the user's",
        "engine/user_code.py",
        "isinstance(error, torch.AcceleratorError) or ",
        "",
        "unit/training/test_messages.py::test_a_fault_of_the_gpu_in_a_step_is_not_the_users",
    ),
    Mutant(
        "a rank that is lost in an exchange of the user's own is taken for their error",
        "engine/user_code.py",
        '"gloo/transport/" in text',
        '"gloo/transports/" in text',
        "unit/test_user_code.py",
    ),
    Mutant(
        "that a tensor which is cut has no such operation is taken for a lost rank",
        "engine/user_code.py",
        " and not files[-1].startswith(_TENSORS)",
        "",
        "unit/test_user_code.py",
    ),
    Mutant(
        "hooks of torch's change which hook of the user's is which",
        "engine/objects/registered_hooks.py",
        "enumerate(theirs)}",
        "enumerate(registered) if _is_user_hook(hook)}",
        "unit/objects/test_registered_hooks.py",
    ),
]
