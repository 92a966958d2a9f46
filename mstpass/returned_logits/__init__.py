"""``logits="drop"``: a step that returns its logits beside their loss returns them without memory.

A Hugging Face model returns ``(loss, logits)``. The logits must then exist in full, and so must
their gradient, which is zero: autograd makes it, because it cannot know that nobody reads them.
Without them as an output, the graph is that of a function that returns the loss alone.

    find_logits.py   which outputs of a graph are logits of a head whose loss is another output
    drop.py          take the outputs out of the graph, and put placeholders into what it returns
    placeholder.py   the placeholder: a tensor without memory that nothing can read

All of this is done to the graph that Dynamo captured, before AOTAutograd adds the backward.
"""

from __future__ import annotations

from mstpass.returned_logits.drop import Drop, drop_logits
from mstpass.returned_logits.placeholder import DroppedLogits, DroppedLogitsError

__all__ = ["Drop", "DroppedLogits", "DroppedLogitsError", "drop_logits"]
