"""What this package raises.

KernelError (ValueError)
├── LayoutError     a tensor is not what its declared layout says, or the layout is not known
├── ChunkError      a canonical tensor has the wrong shape, dtype or device, or overlaps itself
├── SlotError       a slot is beyond the pages, or named twice by a writer
├── HeadsError      a head range reaches beyond the pages or the chunk, or heads cannot be divided
└── CodecError      an engine's writer and the layout disagree, or the order in a page cannot be learnt
KernelUnavailable (RuntimeError)   pages on a GPU, and no Triton to move them with
"""


class KernelError(ValueError):
    """Something was declared or passed that cannot be moved faithfully; nothing was written."""


class LayoutError(KernelError):
    """A tensor of pages is not what its declared layout says."""


class ChunkError(KernelError):
    """A canonical tensor does not fit the pages."""


class SlotError(KernelError):
    """A slot mapping names a slot that is not there, or one slot for two tokens."""


class HeadsError(KernelError):
    """A head range reaches beyond its tensors, or heads cannot be divided as asked."""


class CodecError(KernelError):
    """The engine's writer put values elsewhere than the layout or the codec says."""


class KernelUnavailable(RuntimeError):
    """Pages live on a GPU and Triton is not installed."""
