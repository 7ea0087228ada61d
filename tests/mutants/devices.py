"""Bugs that only an accelerator shows: where tensors, batches and random numbers are."""

from mutants.mutant import Mutant

__all__ = ["DEVICES"]

DEVICES = [
    Mutant(
        "a tensor of the device comes back to the host's",
        "engine/objects/graph_restore.py",
        "        if live.is_cpu != was_on_host:\n            return False\n",
        "",
        "unit/objects/test_devices.py::test_a_tensor_comes_back_to_where_it_was",
    ),
    Mutant(
        "a parameter of the device comes back as a tensor",
        "engine/objects/containers.py",
        "    if type(value) is nn.Parameter:\n        return nn.Parameter(placed, requires_grad=value.requires_grad)\n",
        "",
        "unit/objects/test_devices.py::test_a_tensor_comes_back_to_where_it_was",
    ),
    Mutant(
        "a late buffer of the host comes back on the device",
        "engine/modules/structure.py",
        'device = "cpu" if form.get("on_host") else self._device',
        "device = self._device",
        "unit/objects/test_devices.py::test_buffers_and_layers_that_came_up_in_training_are_where_they_were",
    ),
    Mutant(
        "a late layer's host tensors come back on the device",
        "engine/modules/structure.py",
        "set_layer(owner, name, made)  #",
        "set_layer(owner, name, made.to(self._device))  #",
        "unit/objects/test_devices.py::test_buffers_and_layers_that_came_up_in_training_are_where_they_were",
    ),
    Mutant(
        "tensors of the device that shared memory come back apart",
        "engine/objects/restored_memory.py",
        "if address not in self._moved:",
        "if True:",
        "unit/objects/test_devices.py::test_tensors_that_share_memory_share_it_on_the_device",
    ),
    Mutant(
        "a learning rate of the device comes back on the host",
        "engine/optim/optimizers.py",
        "{k: group[k].to(device) for k, device in",
        "{k: group[k] for k, device in",
        "unit/objects/test_devices.py::test_a_learning_rate_comes_back_to_where_it_was_built",
    ),
    Mutant(
        "a device's random numbers are begun anew elsewhere",
        "engine/seeds.py",
        'if (was := "device" in state_dict) != (self._device is not None):',
        'if (was := "device" in state_dict) and False:',
        "gpu/test_generators.py::test_random_numbers_of_another_kind_of_device_are_refused",
    ),
    Mutant(
        "a value goes on on the host, where the snapshot had it",
        "engine/metrics/accumulator.py",
        "device = value.device if is_on_host(total) else total.device",
        "device = total.device",
        "gpu/test_two_devices.py::test_a_total_from_a_snapshot_goes_on_where_values_are",
    ),
    Mutant(
        "ranks are forked where they could not use CUDA",
        "engine/launch/elastic_ranks.py",
        ' or sys.platform != "linux" or fork_cannot_use_cuda()',
        ' or sys.platform != "linux"',
        "gpu/test_forked_ranks.py",
    ),
    Mutant(
        "a step does not wait for its batch",
        "engine/training/batch_stream.py",
        "        computing.wait_stream(self._stream)\n",
        "",
        "gpu/test_two_devices.py::test_a_batch_is_copied_on_a_stream_that_the_step_waits_for",
    ),
    Mutant(
        "the memory of a batch is free before its step is done",
        "engine/training/batch_stream.py",
        "            copy.record_stream(computing)",
        "            copy.size()",
        "gpu/test_two_devices.py::test_a_batch_is_copied_on_a_stream_that_the_step_waits_for",
    ),
]
