"""A loop of Accelerate that does not know of mst: the command line names the backend.

    pip install 'mstpass[hf]' accelerate
    MSTPASS_LOGITS=drop accelerate launch --dynamo_backend mst examples/accelerate_loop.py

`Accelerator(dynamo_backend="mst")` does the same.
"""

import torch
from accelerate import Accelerator

import mstpass
from mstpass.bench.trainers import Tokens, llama

VOCABULARY = 4096


def main() -> tuple[list[float], mstpass.Report | None]:
    accelerator = Accelerator()
    model = llama(VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.utils.data.DataLoader(Tokens(12, 256, VOCABULARY), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"loss {losses[-1]:.4f}")
    report = mstpass.reports()[-1] if mstpass.reports() else None
    accelerator.print(report)
    return losses, report


if __name__ == "__main__":
    main()
