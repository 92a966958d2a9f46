"""`mstpass.compile(model)`: a Hugging Face model in place, in a training loop that is not changed.

The model returns its logits beside its loss, as always. While it trains, they are a placeholder
without memory: the head runs in chunks, as in a compiled function that returns the loss alone.
Whatever reads the placeholder gets an error. In evaluation the logits are there.

    pip install 'mstpass[hf]' && python examples/compile_model.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass
from mstpass.measure import peak_bytes

VOCABULARY, WIDTH = 4096, 64


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> tuple[list[float], int, int]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    mstpass.compile(model)  # options follow as keywords: memory_budget=0.0, ...
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids_BS = torch.randint(VOCABULARY, (2, 1024), device=device)

    def step() -> None:
        outputs = model(input_ids=ids_BS, labels=ids_BS)
        outputs.loss.backward()
        losses.append(outputs.loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    losses: list[float] = []
    step()
    peak = peak_bytes(step, device)

    outputs = model(input_ids=ids_BS, labels=ids_BS)
    print(outputs.logits)
    try:
        outputs.logits.argmax(-1)
    except mstpass.DroppedLogitsError as error:
        print(f"DroppedLogitsError: {error}")
    with torch.no_grad():
        print("in evaluation:", model(input_ids=ids_BS).logits.argmax(-1).shape)

    mstpass.uncompile(model)  # the model as it was
    eager_peak = peak_bytes(step, device)
    print(f"losses: {losses}")
    print(f"peak of a step: {peak / 2**20:.1f} MiB, of eager {eager_peak / 2**20:.1f} MiB")
    return losses, peak, eager_peak


if __name__ == "__main__":
    main()
