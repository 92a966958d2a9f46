"""One long sequence on many ranks: each holds a part of its tokens.

`sequence_parallel` changes a model of transformers so that its attention exchanges what it needs,
`shard_sequence` cuts batches, and `sequence_parallel_attention` is for models of one's own.

=====================  =========================================================================
``attention.py``       which method a call takes; attention for models of one's own
``ulysses.py``         exchange heads for tokens before attention, and back after it
``ring.py``            send keys and values round, and merge what queries got of each part
``rules.py``           which keys a query sees; attention of a whole sequence, for some of the heads
``batch.py``           a rank's part of a batch: its documents, and labels that count right
``huggingface.py``     what is registered in transformers, and for which models
``ranks.py``           a process group, from a mesh or a group
=====================  =========================================================================
"""

from mstpass.sequences.attention import sequence_parallel_attention
from mstpass.sequences.batch import shard_sequence
from mstpass.sequences.huggingface import sequence_parallel

__all__ = ["sequence_parallel", "sequence_parallel_attention", "shard_sequence"]
