"""How a tensor goes to the host while the device works on."""

import torch


def pinned_copy(x: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory that is enqueued, not yet done; on a CPU the tensor itself."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def enqueued_event(like: torch.Tensor) -> torch.cuda.Event | None:
    """Behind all that ``like``'s device was told so far; None on a CPU, where it is done."""
    if not like.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event
