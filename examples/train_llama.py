"""Trains a Hugging Face Llama with the mst backend: compile a function that returns the loss alone.

A compiled module returns its logits as well, so they must exist in full (`compile_model.py` shows
how to drop them). The function that is compiled here returns only the loss, so that the logits
exist one chunk at a time.

    pip install 'mstpass[hf]' && python examples/train_llama.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mstpass


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def main(steps: int = 3) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids_BS = torch.randint(8192, (2, 512), device=device)

    @torch.compile(backend="mst")
    def loss_fn(ids_BS: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids_BS, labels=ids_BS).loss

    losses = []
    for step in range(steps):
        loss = loss_fn(ids_BS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")

    print(mstpass.reports()[-1])
    return losses


if __name__ == "__main__":
    main()
