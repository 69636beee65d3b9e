"""Counts what ZeRO-3 moves and holds: parameter all-gathers, their bytes, invalidated traces, gathered memory."""

import dataclasses
from contextlib import contextmanager

from torch.multiprocessing.reductions import StorageWeakRef


@dataclasses.dataclass
class Reading:
    """What was seen between two `take` calls."""

    gathers: int = 0
    gathered_bytes: int = 0
    # DeepSpeed compares the ranks' traces by broadcasts whenever it has no valid trace.
    broadcasts: int = 0
    invalidations: int = 0
    peak_bytes: int = 0


class GatherMeter:
    """Sits at the lowest layer of DeepSpeed that every parameter gather passes, whoever asked for it."""

    def __init__(self):
        self.reading = Reading()
        # Weak references to storages, so that a gathered tensor counts for as long as anything (autograd too) holds
        # it, not only while DeepSpeed calls it available.
        self.alive = []

    def take(self):
        """The counts since the last call."""
        reading, self.reading = self.reading, Reading()
        return reading

    def look(self, parameters):
        """Note what is held now."""
        self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
        known = {ref.cdata for ref, _ in self.alive}
        for parameter in parameters:
            storage = parameter.data.untyped_storage()
            if parameter.ds_status.name == "AVAILABLE" and parameter.data.numel():
                ref = StorageWeakRef(storage)
                if ref.cdata not in known:
                    known.add(ref.cdata)
                    self.alive.append((ref, storage.nbytes()))
        self.reading.peak_bytes = max(self.reading.peak_bytes, sum(size for _, size in self.alive))

    @contextmanager
    def watching(self):
        """Count for the time of a block, in which the process group must exist."""
        from deepspeed.comm import comm
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

        backend = comm.cdb
        own = {n: getattr(backend, n) for n in ("all_gather_into_tensor", "all_gather", "broadcast")}
        fetch, invalidate = Coordinator.fetch_sub_module, Coordinator._invalidate_trace

        def all_gather_into_tensor(output_tensor, input_tensor, *args, **kwargs):
            self.reading.gathers += 1
            self.reading.gathered_bytes += output_tensor.numel() * output_tensor.element_size()
            return own["all_gather_into_tensor"](output_tensor, input_tensor, *args, **kwargs)

        def all_gather(tensor_list, tensor, *args, **kwargs):
            self.reading.gathers += 1
            self.reading.gathered_bytes += sum(t.numel() * t.element_size() for t in tensor_list)
            return own["all_gather"](tensor_list, tensor, *args, **kwargs)

        def broadcast(*args, **kwargs):
            self.reading.broadcasts += 1
            return own["broadcast"](*args, **kwargs)

        def fetch_sub_module(coordinator, module, *args, **kwargs):
            # The gathered set grows only here, and right after it this module's parameters are in place.
            outcome = fetch(coordinator, module, *args, **kwargs)
            self.look(module.parameters())
            return outcome

        def invalidate_trace(coordinator):
            self.reading.invalidations += 1
            return invalidate(coordinator)

        backend.all_gather_into_tensor, backend.all_gather, backend.broadcast = (
            all_gather_into_tensor,
            all_gather,
            broadcast,
        )
        Coordinator.fetch_sub_module, Coordinator._invalidate_trace = fetch_sub_module, invalidate_trace
        try:
            yield self
        finally:
            for name in own:
                delattr(backend, name)
            Coordinator.fetch_sub_module, Coordinator._invalidate_trace = fetch, invalidate
